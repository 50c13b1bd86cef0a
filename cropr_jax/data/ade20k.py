"""ADE20k of the Scene Parsing Challenge 2016 (150 classes) as a TFDS data set.

    python -m cropr_jax.data.ade20k --release ADEChallengeData2016

Writes `ade20k` to `--dir`, by default $TFDS_DATA_DIR, from the unpacked release, which is what
published figures are on: 20,210 images to train on and 2,000 to validate. Masks are stored as they
are, 0 for what does not count and 1 to 150 for classes; they become labels when they are read
(`annotations.Legend.labels`).

Neither the TFDS data set `scene_parse150`, which has masks of objects of another challenge, nor the
full ADE20k release of over 3,000 classes will do, and both are refused.
"""

from __future__ import annotations

import collections
import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from PIL import Image

from cropr_jax.data.annotations import Legend, make_legend, read_mask
from cropr_jax.data.digits import quiet
from cropr_jax.errors import ConfigError
from cropr_jax.host import cli

CLASSES = 150
EXAMPLES = {"train": 20_210, "validation": 2_000}
# Split of the data set and of the release.
_SPLITS = {"train": "training", "validation": "validation"}
_NAMES = ("objectInfo150.txt", "object150_info.csv")
# What lies in a full release, of 2016 or of 2021, and not in the challenge's.
_FULL = ("index_ade20k.*", "images/ADE", "images/training/*/")


class Ade20k(tfds.core.GeneratorBasedBuilder):
    """Features: `image` (JPEG, as in the release), `label_map` (PNG, uint8 [h, w, 1]), `id`.

    The metadata describe the classes in the form that `annotations.make_legend` reads, and give the
    greatest height and width of a mask by split (`largest`).
    """

    name = "ade20k"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Unpack ADEChallengeData2016.zip of http://sceneparsing.csail.mit.edu into manual_dir."
    )
    # Nothing is downloaded, so there are no checksums to look for.
    code_path = None

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label_map": tfds.features.Image(shape=(None, None, 1), encoding_format="png"),
            "id": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="ADE20k of the Scene Parsing Challenge 2016, 150 classes.",
            features=tfds.features.FeaturesDict(features),
            metadata=tfds.core.MetadataDict(),
            homepage="http://sceneparsing.csail.mit.edu",
        )

    def _split_generators(self, dl_manager):
        root = find_release(Path(dl_manager.manual_dir))
        names = read_names(root)
        meta: dict[str, Any] = {
            "classes": [{"id": number, "name": name} for number, name in enumerate(names, 1)],
            "ignore_id": 0,
        }
        legend = make_legend(meta, {}, str(root))
        pairs = {split: find_pairs(root, folder) for split, folder in _SPLITS.items()}
        meta["largest"] = {split: _largest(found) for split, found in pairs.items()}
        metadata: Any = self.info.metadata
        metadata.update(meta)
        return {split: self._generate_examples(found, legend) for split, found in pairs.items()}

    def _generate_examples(
        self, pairs: Mapping[Path, Path], legend: Legend
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for image, mask in pairs.items():
            legend.labels(read_mask(mask), str(mask))
            # Paths, so that the files are stored as they are.
            yield image.stem, {"image": str(image), "label_map": str(mask), "id": image.stem}


def find_release(folder: Path) -> Path:
    """The root of the challenge's release, `folder` itself or one in it.

    Raises:
      ConfigError: it is not there, or the full ADE20k lies there instead.
    """
    roots = (folder, folder / "ADEChallengeData2016")
    for root in roots:
        if all((root / kind / "training").is_dir() for kind in ("images", "annotations")):
            return root
    full = [
        path for pattern in _FULL for path in (*folder.glob(pattern), *folder.glob(f"*/{pattern}"))
    ]
    if full:
        raise ConfigError(
            f"{folder}: the full ADE20k release ({full[0].name} lies in it), with masks of over "
            "3,000 classes in colours. Give ADEChallengeData2016, whose masks have 150 classes."
        )
    raise ConfigError(
        f"{folder}: no images/training and annotations/training in it, nor in its "
        "ADEChallengeData2016. Unpack ADEChallengeData2016.zip there."
    )


def read_names(root: Path) -> tuple[str, ...]:
    """The names of the 150 classes, by id from 1: the first of the synonyms that the release lists.

    All of them, where another class has the same first one.

    Raises:
      ConfigError: no file of names, or another number of them.
    """
    path = next((root / name for name in _NAMES if (root / name).is_file()), None)
    if path is None:
        raise ConfigError(
            f"{root}: neither {' nor '.join(_NAMES)}, which name the classes. The release has the "
            "first, github.com/CSAILVision/semantic-segmentation-pytorch the other (data/)."
        )
    lines = path.read_text().splitlines()
    delimiter = "\t" if "\t" in lines[0] else ","
    rows = list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))
    synonyms = [
        [word.strip() for word in (row.get("Name") or "").replace(";", ",").split(",")]
        for row in ({(key or "").strip(): value for key, value in row.items()} for row in rows)
    ]
    if len(synonyms) != CLASSES or not all(words[0] for words in synonyms):
        raise ConfigError(
            f"{path}: {len(synonyms)} classes, expected {CLASSES} with a column Name. Take the "
            "file of the Scene Parsing Challenge 2016."
        )
    first = collections.Counter(words[0] for words in synonyms)
    return tuple(w[0] if first[w[0]] == 1 else ", ".join(w) for w in synonyms)


def find_pairs(root: Path, split: str) -> dict[Path, Path]:
    """The masks of a split's images, by image, sorted by name.

    Raises:
      ConfigError: none, an image without a mask or the other way round, or of two sizes.
    """
    images = {path.stem: path for path in (root / "images" / split).glob("*.jpg")}
    masks = {path.stem: path for path in (root / "annotations" / split).glob("*.png")}
    alone = sorted(images.keys() ^ masks.keys())
    if alone or not images:
        raise ConfigError(
            f"{root}: {len(images)} images/{split}/*.jpg and {len(masks)} annotations/{split}/"
            f"*.png{f', {alone[0]} among those without the other' if alone else ''}. Unpack the "
            "release again."
        )
    for name in images:
        with Image.open(images[name]) as image, Image.open(masks[name]) as mask:
            if image.size != mask.size:
                raise ConfigError(
                    f"{masks[name]}: {mask.height}x{mask.width} pixels (height x width), but its "
                    f"image has {image.height}x{image.width}. Unpack the release again."
                )
    return {images[name]: masks[name] for name in sorted(images)}


def _largest(pairs: Mapping[Path, Path]) -> tuple[int, int]:
    sizes = []
    for mask in pairs.values():
        with Image.open(mask) as image:
            sizes.append((image.height, image.width))
    heights, widths = zip(*sizes, strict=True)
    return max(heights), max(widths)


def prepare(release: str, folder: str = "", examples: Mapping[str, int] | None = None) -> Path:
    """Writes the data set and returns where it lies; one that is there already is left.

    Args:
      release: folder of the unpacked ADEChallengeData2016, or the one that holds it.
      folder: TFDS data folder; by default $TFDS_DATA_DIR, else `~/tensorflow_datasets`.
      examples: how many there have to be of each split; by default those of the release.

    Raises:
      ConfigError: another release, part of one, or a mask that is none.
    """
    root = find_release(Path(release).expanduser())
    for split, count in (examples or EXAMPLES).items():
        found = len(list((root / "images" / _SPLITS[split]).glob("*.jpg")))
        if found != count:
            raise ConfigError(
                f"{root}: {found} images to {split}, expected {count}. Unpack the release again."
            )
    folder = folder or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    builder = Ade20k(data_dir=os.path.expanduser(folder), file_format="array_record")
    config = tfds.download.DownloadConfig(
        manual_dir=str(root),
        compute_stats=tfds.download.ComputeStatsMode.SKIP,
        try_download_gcs=False,
    )
    with quiet():
        builder.download_and_prepare(download_config=config)
    return Path(builder.data_dir)


def main() -> None:
    """Reads the command line and prepares the data set."""
    made = cli.parser("cropr_jax.data.ade20k", __doc__)
    made.add_argument("--release", required=True, help="the unpacked ADEChallengeData2016")
    made.add_argument("--dir", default="", help="TFDS data folder; default: $TFDS_DATA_DIR")
    arguments = made.parse_args()
    cli.say(f"Reads {arguments.release}; every mask is looked at, which takes minutes")
    cli.say(f"Wrote {prepare(arguments.release, arguments.dir)}")


if __name__ == "__main__":
    cli.run(main)
