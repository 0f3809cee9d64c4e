"""A group server's workers, who sum up among themselves, and its parent, whose barrier commits: whatever happens in
whichever order, each commit is the weighted mean of the gradients that were made for it, and there is always a next.
"""

from collections import deque
from fractions import Fraction
from random import Random

import pytest

from evenstep.core.coordinate import Bundle

WORKERS = 4
MAX_STEPS = 500


class Parent:
    """A barrier, and nothing else: who comes takes part in the iteration under way."""

    def __init__(self):
        self.here = set()
        self.staged = {}
        self.commits = 0
        self.down = deque()

    def begin(self, line):
        self.here.add(line)
        self.down.append(("answer", line))

    def together(self, number, pushes, gradient):
        if not self.here.issuperset(pushes):
            self.down.append(("refused", number))
            return
        self.staged |= {line: (units, own, gradient) for line, (units, own) in pushes.items()}
        self.commit_once_complete()

    def end(self, line):
        self.here.discard(line)
        self.commit_once_complete()

    def commit_once_complete(self):
        if not self.staged or not self.here.issubset(self.staged):
            return
        staged, self.staged = self.staged, {}
        self.commits += 1
        total, expected = {}, {}
        whole = sum(units for units, _, _ in staged.values())
        for units, own, gradient in staged.values():
            if units:
                add(expected, {own: 1}, Fraction(units, whole))
                add(total, gradient, Fraction(units, whole))
        assert total == expected
        self.down.extend(("answer", line) for line in sorted(self.here))


def add(total, gradient, weight):
    for name, part in gradient.items():
        total[name] = total.get(name, 0) + weight * part


class Behind:
    """The group server, as `runtime.server.group` drives its bundle; lines are numbered as they come."""

    def __init__(self):
        self.bundle = Bundle()
        self.parent = Parent()
        self.up = deque()
        self.lines = 0
        self.does = {}
        """What each line is at: waits, computes, offers, pushes, or sums up in the ring of this number."""
        self.made = {}
        """Units and the name of what each has computed."""
        self.seats = {}
        self.rings = {}

    # The group server.

    def pass_on(self):
        agreed = self.bundle.agreed()
        if agreed is not None:
            for line, weight in agreed.weights:
                self.does[line] = "pushes" if agreed.ring is None else agreed.ring.number
                if agreed.ring is not None:
                    self.rings.setdefault(agreed.ring.number, agreed.ring.lines)
                    self.seats[line] = {self.made[line][1]: Fraction(weight).limit_denominator(1000)}
        while (together := self.bundle.due()) is not None:
            pushes = {line: self.made[line] for line, _ in together.weights}
            gradient = {}
            if together.holder is not None:
                gradient = dict(self.seats[together.holder])
            else:
                for line, weight in together.weights:
                    add(gradient, self.seats[line] if weight else {}, Fraction(weight).limit_denominator(1000))
            self.up.append((self.parent.together, together.number, pushes, gradient))

    def lost(self, line, *, ended=False):
        if self.does.pop(line, None) is None:
            return
        if not ended:
            self.up.append((self.parent.end, line))
        self.begin_anew(self.bundle.leave(line))
        self.pass_on()

    def begin_anew(self, lines):
        for line in lines:
            self.lost(line)

    # What happens.

    def come(self):
        self.lines += 1
        self.does[self.lines] = "waits"
        self.bundle.join(self.lines)
        self.bundle.ask(self.lines)
        self.up.append((self.parent.begin, self.lines))

    def fall_silent(self, line):
        self.parent.down.append(("ended", line))
        self.parent.end(line)

    def compute_what_is_no_number(self, line):
        """It is left out, so nothing is offered."""
        self.computed(line, 0)
        self.push(line)

    def faults(self):
        faults = [(self.lost, line) for line in self.does]
        faults += [(self.fall_silent, line) for line in sorted(self.parent.here)]
        return faults + [(self.compute_what_is_no_number, line) for line in self.lines_that("computes")]

    def steps(self):
        """What can happen next where nothing goes wrong."""
        steps = [(self.compute, line) for line in self.lines_that("computes")]
        steps += [(self.push, line) for line in self.lines_that("pushes")]
        steps += [(self.sum_up, number) for number in sorted(set(self.does.values()) & set(self.rings))]
        steps += [(self.reach_parent,)] if self.up else []
        return steps + ([(self.hear_from_parent,)] if self.parent.down else [])

    def lines_that(self, what):
        return [line for line, does in self.does.items() if does == what]

    def computed(self, line, units):
        name = f"{line}, {self.parent.commits}"
        self.made[line], self.seats[line] = (units, name), {name: Fraction(1)}

    def compute(self, line):
        units = 1 + line % 3
        self.computed(line, units)
        self.does[line] = "offers"
        self.bundle.offer(line, samples=units, units=units)
        self.pass_on()

    def push(self, line):
        self.does[line] = "waits"
        units, _ = self.made[line]
        self.bundle.push(line, samples=units, units=units)
        self.pass_on()

    def sum_up(self, number):
        """All who are in the ring add up; or, where somebody is gone, those who wait for it find out, one by one."""
        ring = self.rings[number]
        there = [line for line in ring if self.does.get(line) == number]
        if len(there) < len(ring):
            self.lost(there[0])
            return
        total = {}
        for line in ring:
            add(total, self.seats[line], 1)
            self.seats[line] = {"of no meaning": Fraction(1)}
        self.seats[ring[0]] = total
        for line in ring:
            self.does[line] = "pushes"

    def reach_parent(self):
        act, *arguments = self.up.popleft()
        act(*arguments)

    def hear_from_parent(self):
        what, which = self.parent.down.popleft()
        if what == "refused":
            self.begin_anew(self.bundle.refuse(which))
        elif what == "ended":
            self.lost(which, ended=True)
        elif which in self.does:
            self.bundle.answer(which, 1, over=False)
            self.does[which] = "computes"
        self.pass_on()

    def end(self):
        """When nothing more happens to anybody, there are further commits."""
        commits = self.parent.commits
        for _ in range(MAX_STEPS):
            if not self.does or self.parent.commits >= commits + 3:
                return
            act, *arguments = self.steps()[-1]
            act(*arguments)
        raise AssertionError(f"nothing is committed any more: {self.does}")


@pytest.mark.parametrize("fault", [0.02, 0.1])
def test_promises_hold_in_any_order_of_events(fault):
    for seed in range(100):
        draw, run = Random(seed), Behind()
        for _ in range(150):
            at_hand = run.faults() if draw.random() < fault else run.steps()
            if len(run.does) < WORKERS and draw.random() < 0.1:
                at_hand = [(run.come,)]
            if at_hand:
                act, *arguments = draw.choice(at_hand)
                act(*arguments)
        run.end()
