"""What the suite for GPUs trains: small nets in float64 for parity, a ResNet-50-like net and a GPT for time."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 32, 10


class Net(nn.Module):
    """Two hidden layers with norms in between."""

    def __init__(self, width=64, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, CLASSES),
        ).to(dtype)  # fmt: skip

    def forward(self, inputs):
        return self.layers(inputs)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with norms around a residual; He et al. (2016), figure 5 on the right."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.around = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, images):
        return torch.relu(self.main(images) + self.around(images))


def resnet(blocks=(3, 4, 6, 3), width=64):
    """The 50-layer ResNet: 25.6 M parameters."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not number else 1))
            inputs = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states):
        batch, length, width = states.shape
        split = self.attend(self.before(states)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*split, is_causal=True)
        states = states + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return states + self.mix(self.after(states))


class GPT(nn.Module):
    """A decoder of 12 layers; 768 wide with 20,000 tokens, 101 M parameters."""

    def __init__(self, tokens=20_000, length=256, width=768, layers=12, heads=12):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.places(places)))).flatten(0, 1)


def loss_of(outputs, targets):
    return cross_entropy(outputs, targets.flatten())


def rows(samples, dtype=torch.float64):
    """A dataset for `Net`."""
    made = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, FEATURES, generator=made, dtype=dtype),
        torch.randint(CLASSES, (samples,), generator=made),
    )


def images(samples, side):
    """A dataset for `resnet`."""
    return TensorDataset(torch.randn(samples, 3, side, side), torch.randint(1000, (samples,)))


def texts(samples, length, tokens):
    """A dataset for `GPT`."""
    drawn = torch.randint(tokens, (samples, length + 1))
    return TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


def loader_of(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)
