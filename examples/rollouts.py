"""Trains on rollouts of unequal length in a loop without a loader: evenstep.balance divides them by tokens."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import evenstep


class Policy(torch.nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.token, self.out = torch.nn.Embedding(64, width), torch.nn.Linear(width, 64)
        self.hidden = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))

    def forward(self, tokens):
        return self.out(self.hidden(self.token(tokens)))


def rollouts_of(step):
    """The same on all workers; those of a real policy come from its inference servers."""
    generator = torch.Generator().manual_seed(step)
    lengths = (4.5 + torch.randn(options.rollouts, generator=generator)).exp().clamp(8, 1000).long().tolist()
    advantages = torch.randn(options.rollouts, generator=generator)
    return [torch.randint(64, (length,), generator=generator) for length in lengths], advantages


def backward(rollouts, advantages, tokens):
    """Add to the gradients of the loss, a mean over the tokens of all rollouts of the step; return this part of it."""
    inputs = pad_sequence([each[:-1] for each in rollouts], batch_first=True)
    targets = pad_sequence([each[1:] for each in rollouts], batch_first=True, padding_value=-100)
    losses = functional.cross_entropy(policy(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    loss = (losses.view_as(targets) * advantages[:, None]).sum() / tokens
    loss.backward()
    return loss.detach()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rollouts", type=int, default=64, help="in a step, of all workers")
parser.add_argument("--tokens", type=int, default=4000, help="at most, in a micro-batch")
parser.add_argument("--slow", type=float, default=1.0, help="make the last worker this many times slower")
options = parser.parse_args()
rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if workers > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
policy, speeds = Policy(), None
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
for step in range(1, options.steps + 1):
    rollouts, advantages = rollouts_of(step)
    costs = [len(each) for each in rollouts]
    parts = evenstep.balance(costs, workers, speeds=speeds, micro_batch_cost=options.tokens)
    began, loss = time.perf_counter(), torch.zeros(())
    optimizer.zero_grad(set_to_none=False)
    for own in parts[rank]:
        loss += backward([rollouts[each] for each in own], advantages[own], sum(costs))
    if rank == workers - 1:
        time.sleep((options.slow - 1) * (time.perf_counter() - began))
    seconds, tokens = time.perf_counter() - began, [sum(costs[each] for own in part for each in own) for part in parts]
    mine = torch.tensor([seconds, loss])
    done = [torch.zeros(2) for _ in parts] if workers > 1 else [mine]
    if workers > 1:
        for parameter in policy.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_gather(done, mine)
    took, losses = torch.stack(done).T.tolist()
    speeds = [count / each for count, each in zip(tokens, took, strict=True)]
    optimizer.step()
    if rank == 0 and step % 5 == 0:
        slowest = max(took) / min(took)
        print(f"step {step}: loss {sum(losses):.4f}, tokens {tokens}, {slowest:.2f} times as long as the fastest")
if workers > 1:
    dist.destroy_process_group()
