"""A node's data and local training, in NumPy: ten classes of points, where each node has mostly two of them."""

import numpy as np

CLASSES, FEATURES, HIDDEN = 10, 64, 32
_CENTRES = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))


def initial(seed=0):
    """The weights of a net with one hidden layer."""
    generator = np.random.default_rng(seed)
    return {
        "first": generator.normal(size=(FEATURES, HIDDEN)) / np.sqrt(FEATURES),
        "second": generator.normal(size=(HIDDEN, CLASSES)) / np.sqrt(HIDDEN),
    }


def points(generator, targets):
    return _CENTRES[targets] + 2.0 * generator.normal(size=(len(targets), FEATURES)), targets


def private_data(partition):
    """The points of node `partition`; node 0 has the most."""
    generator = np.random.default_rng(1 + partition)
    count = 1200 // (1 + partition % 4)
    favourites = np.array([2 * partition, 2 * partition + 1]) % CLASSES
    common = generator.random(count) < 0.4
    return points(
        generator, np.where(common, generator.integers(CLASSES, size=count), generator.choice(favourites, count))
    )


def test_data():
    generator = np.random.default_rng(0)
    return points(generator, generator.integers(CLASSES, size=2000))


def accuracy(weights, data):
    inputs, targets = data
    return float((np.argmax(np.tanh(inputs @ weights["first"]) @ weights["second"], axis=1) == targets).mean())


def train(weights, data, *, batch_size, steps, lr, generator, slowdown=1):
    """Run `steps` steps of SGD on random batches. A slow node computes each gradient `slowdown` times."""
    weights = {name: values.copy() for name, values in weights.items()}
    for _ in range(steps):
        rows = generator.choice(len(data[0]), size=batch_size)
        for _ in range(slowdown):
            gradients = _gradients(weights, data[0][rows], data[1][rows])
        for name, gradient in gradients.items():
            weights[name] -= lr * gradient
    return weights


def _gradients(weights, inputs, targets):
    hidden = np.tanh(inputs @ weights["first"])
    scores = hidden @ weights["second"]
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    likely[np.arange(len(targets)), targets] -= 1.0
    likely /= len(targets)
    back = (likely @ weights["second"].T) * (1.0 - hidden**2)
    return {"first": inputs.T @ back, "second": hidden.T @ likely}
