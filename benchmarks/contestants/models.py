"""Tensors as models have them: how many elements each parameter holds; the standard library alone."""

import itertools

_SMALL = 1_000_000


def parameter_sizes(elements):
    """Elements of each parameter of a model that has so many: ResNet-50's 161 in proportion, or a perceptron's six."""
    return _scaled(_resnet50() if elements > _SMALL else _perceptron((64, 128, 128, 10)), elements)


def _perceptron(widths):
    return [size for before, after in itertools.pairwise(widths) for size in (before * after, after)]


def _resnet50():
    sizes, before = [3 * 64 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(before * width, width), (9 * width * width, width), (width * 4 * width, 4 * width)]
            if block == 0:
                convolutions.append((before * 4 * width, 4 * width))
            for weights, channels in convolutions:
                sizes += [weights, channels, channels]
            before = 4 * width
    return [*sizes, before * 1000, 1000]


def _scaled(sizes, elements):
    """In proportion, each at least 1; the largest takes what rounding leaves."""
    total = sum(sizes)
    scaled = [max(1, size * elements // total) for size in sizes]
    largest = scaled.index(max(scaled))
    scaled[largest] += elements - sum(scaled)
    return scaled
