"""Made-up data sets: the same every time, and what their pixels tell is true."""

import numpy as np

from cropr_jax.data.readers.fake import FakeMaps


def test_every_pixel_tells_its_class():
    reader = FakeMaps(num_examples=7, image_size=(10, 14), num_classes=5)
    assert len(reader) == 7 and len(reader.class_names) == 5 and reader.largest() == (10, 14)
    seen = set()
    for i in range(7):
        image, label = reader(i)
        assert label.shape == image.shape[:2] == (10 - i % 3, 14 - i % 2)
        assert label.dtype == image.dtype == np.uint8
        assert (label[0] == 255).all()
        for channel in range(3):
            told = image[1:, :, channel].astype(int) * 5 // 256
            np.testing.assert_array_equal(told, label[1:])
        seen |= set(label[1:].ravel())
        np.testing.assert_array_equal(reader(i)[0], image)
    assert seen == set(range(5))
