"""Models of the kinds that people write: their samples, the same for every framework."""

from dataclasses import replace

import numpy as np

from evenstep.schemes import static
from support.frameworks.task import GLOBAL, LENGTH

KINDS = ("conv", "recurrent", "attention", "embedding", "dense over time", "several inputs and outputs", "masked")
SIZES = [12, 9, 3]
SCHEME = replace(static(SIZES), nonfinite="skip")
STEPS, WIDTH, WORDS, CLASSES = 6, 8, 20, 3
SLICES = [np.arange(at, min(at + GLOBAL, LENGTH)) for at in range(0, LENGTH, GLOBAL)]
FAULT = 4
"""The iteration in which worker 1 has a fault, and its samples there."""
FAULTY = np.arange(SIZES[0], SIZES[0] + SIZES[1])


def samples(kind):
    """Arrays with a row for each sample; the last is the labels."""
    generator = np.random.default_rng(7)
    labels = generator.integers(0, CLASSES, LENGTH).astype(np.int32)

    def floats(*shape):
        return generator.normal(size=(LENGTH, *shape)).astype(np.float32)

    if kind == "conv":
        return floats(WIDTH, WIDTH, 2), labels
    if kind == "embedding":
        return generator.integers(0, WORDS, (LENGTH, STEPS)).astype(np.int32), labels
    if kind == "masked":  # 0 is padding, whose label counts nothing.
        words = generator.integers(1, WORDS, (LENGTH, STEPS)).astype(np.int32)
        words[np.arange(STEPS) >= generator.integers(1, STEPS + 1, (LENGTH, 1))] = 0
        return words, np.where(words > 0, words % CLASSES, -1).astype(np.int32)
    if kind == "several inputs and outputs":
        return floats(WIDTH), floats(STEPS), floats(1), labels
    return floats(STEPS, WIDTH), labels


def factors(indices, iteration, faulty):
    """What each sample's loss is multiplied by: those of the fault by `faulty`."""
    kept = np.ones(len(indices), np.float32)
    if iteration == FAULT and faulty is not None:
        kept[np.isin(indices, SLICES[FAULT][FAULTY])] = faulty
    return kept
