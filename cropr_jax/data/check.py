"""Reads every example of a config's data set and lists all that is wrong, before a run meets it.

    python -m cropr_jax.data.check --config configs/image_folder.py:vit_b --config.data.dir=/data

Every image is decoded, every label compared with the classes, every mask with its image. The exit
status is 0 if all is well, and 1 if something is listed.
"""

import argparse
import functools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from cropr_jax.data.open import Splits
from cropr_jax.data.preprocess import decode
from cropr_jax.data.records import CLASS, IGNORE, MAP, Record, Source
from cropr_jax.errors import ConfigError
from cropr_jax.host import cli, config_file
from cropr_jax.host.messages import printable

# Examples that a worker takes at a time.
_PART = 64


class Found(NamedTuple):
    """What was found in some examples.

    Attributes:
      wrong: in words, with the file.
      classes: examples by label; of maps, in how many a class is.
    """

    wrong: list[str]
    classes: Counter[int]


def look(source: Source, numbers: Iterable[int]) -> Found:
    """Reads the examples of those numbers.

    Args:
      source: of the examples.
      numbers: from 0, of this source.
    """
    wrong, classes = [], Counter()
    for number in numbers:
        try:
            record = source[number]
            with source.reading(record["id"]):
                _check(record, source)
        except ConfigError as error:
            wrong.append(str(error))
            continue
        classes.update(_labels(record, source.reader.kind))
    return Found(wrong, classes)


def _check(record: Record, source: Source) -> None:
    """Decodes an image, and compares its label.

    Raises:
      ValueError: in words, if they do not go together.
    """
    image, label = decode(record["image"]), record["label"]
    image.load()
    if source.reader.kind == CLASS and not 0 <= label < source.num_classes:
        raise ValueError(f"label {label}, expected 0 to {source.num_classes - 1}")
    if source.reader.kind == MAP and label.shape != (image.height, image.width):
        raise ValueError(
            f"a mask of {label.shape[0]}x{label.shape[1]} pixels (height x width) on an image of "
            f"{image.height}x{image.width}"
        )


def _labels(record: Record, kind: str) -> list[int]:
    if kind == MAP:
        return [label for label in np.unique(record["label"]).tolist() if label != IGNORE]
    return [int(record["label"])] if kind == CLASS else []


def check_source(source: Source, workers: int) -> Iterator[Found]:
    """What is found in a source, part by part.

    Args:
      source: of the examples.
      workers: processes; 0 for this one.
    """
    parts = [
        range(start, min(start + _PART, len(source))) for start in range(0, len(source), _PART)
    ]
    work = functools.partial(look, source)
    if not workers:
        yield from map(work, parts)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(work, parts)


def check_data(data: Mapping[str, Any], workers: int) -> dict[str, Found]:
    """What is found in every split of a config.

    Args:
      data: `config.data`.
      workers: processes; 0 for this one.

    Returns:
      By split, the training one first. One that cannot be opened has that as its only line.
    """
    splits, found = Splits(data), {}
    opened = {data["train"]: lambda: splits.train}
    for name, split in data["eval"].items():
        opened.setdefault(split, functools.partial(splits.eval, name))
    for split, make in opened.items():
        try:
            source = make()
        except ConfigError as error:
            found[split] = Found([str(error)], Counter())
            continue
        wrong, classes = [], Counter()
        with tqdm(total=len(source), desc=split, unit="example") as bar:
            for number, part in enumerate(check_source(source, workers)):
                wrong += part.wrong
                classes += part.classes
                bar.update(min(_PART, len(source) - number * _PART))
        missing = [n for i, n in enumerate(source.class_names) if not classes[i]]
        print(printable(_summary(split, len(source), len(wrong), missing)))
        found[split] = Found(wrong, classes)
    return found


def _summary(split: str, count: int, wrong: int, missing: Sequence[str]) -> str:
    words = f"{split}: {count} examples, {wrong} cannot be used"
    listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return words + (f"; no example of {len(missing)} classes: {listed}" if missing else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser("cropr_jax.data.check", __doc__)
    parser.add_argument("--config", required=True, help="FILE or FILE:VARIANT,KEY=VALUE,...")
    parser.add_argument("--workers", type=_count, default=2, help="processes, 0 for none")
    args, words = parser.parse_known_args(argv)
    for word in words:
        if not word.startswith("--config."):
            parser.error(f"unknown argument {word!r}")
    loaded = config_file.load(args.config, words)
    found = check_data(loaded.data.to_dict(), args.workers)
    lines = [line for split in found.values() for line in split.wrong]
    for line in lines:
        print(printable(line))
    if lines:
        sys.exit(1)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 512:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 512")
    return int(text)


if __name__ == "__main__":
    cli.run(main)
