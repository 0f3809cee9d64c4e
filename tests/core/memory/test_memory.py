import json
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.memory import ROUNDING_BYTES, MemoryModel
from evenstep.core.values import UNLIMITED

MIB = 2**20
GIB = 2**30


def rounded(size, block):
    return -(-size // block) * block


@dataclass(frozen=True)
class Device:
    """Memory as PyTorch's allocator takes it: what is needed, in blocks of 2 MiB, in segments of 20 MiB."""

    capacity: int
    base: int
    per_sample: int
    segments: bool

    def peak(self, samples):
        needed = rounded(self.base + self.per_sample * samples, 2 * MIB)
        return rounded(needed, 20 * MIB) if self.segments else needed

    @property
    def limit(self):
        """The largest size that really fits."""
        samples = (self.capacity - self.base) // self.per_sample
        while self.peak(samples) > self.capacity:
            samples -= 1
        return samples


@st.composite
def devices(draw):
    capacity = draw(st.integers(8 * GIB, 96 * GIB))
    base = draw(st.integers(0, 2 * capacity // 5))
    limit = draw(st.integers(40, 5000))
    return Device(capacity, base, (capacity - base) // limit, draw(st.booleans()))


def model(device, *, base_known=False, **changes):
    return MemoryModel(capacity_bytes=device.capacity, base_bytes=device.base if base_known else 0, **changes)


def fed(memory, device, sizes):
    for samples in sizes:
        memory.observe(samples, device.peak(samples))
    return memory


def test_nothing_is_known_at_first():
    memory = MemoryModel(capacity_bytes=8 * GIB)
    assert memory.largest_size() == UNLIMITED
    memory.observe(0, GIB)
    memory.observe(8, 0)
    assert memory.largest_size() == UNLIMITED


@given(devices(), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30), st.booleans(), st.sampled_from([0.0, 0.05]))
def test_no_size_that_it_allows_exceeds_the_capacity(device, fractions, base_known, margin):
    memory = model(device, base_known=base_known, margin=margin)
    for fraction in fractions:
        fed(memory, device, [max(int(fraction * device.limit), 1)])
        assert memory.largest_size() <= device.limit


@given(devices(), st.booleans())
def test_following_what_it_allows_comes_near_the_limit(device, base_known):
    size = max(device.limit // 50, 1)
    memory = model(device, base_known=base_known)
    for _ in range(12):
        fed(memory, device, [size])
        assert size <= memory.largest_size() <= min(device.limit, 2 * size)
        size = memory.largest_size()
    assert size >= 0.85 * device.limit - 1


@given(devices(), st.floats(0.1, 0.4), st.floats(0.5, 0.9))
def test_two_sizes_are_enough_to_come_near_the_limit(device, small, large):
    memory = fed(model(device), device, [int(small * device.limit), int(large * device.limit)])
    assert 0.85 * device.limit - 1 <= memory.largest_size() <= device.limit


@given(devices(), st.floats(0.5, 0.9))
def test_one_size_is_enough_where_the_base_is_known(device, fraction):
    memory = fed(model(device, base_known=True), device, [int(fraction * device.limit)])
    assert 0.85 * device.limit - 1 <= memory.largest_size() <= device.limit


def test_rounding_counts_against_the_slope_and_against_the_limit():
    memory = MemoryModel(capacity_bytes=800 * MIB, margin=0.0, rounding_bytes=20 * MIB)
    memory.observe(40, 500 * MIB)
    memory.observe(60, 600 * MIB)
    # 100 MiB may have been 120 for 20 samples; of the 300 that are left above the smaller size, rounding may take 20.
    assert memory.largest_size() == 40 + 280 // 6


def test_one_size_and_no_base_is_taken_in_proportion():
    # 4 GiB for 64 samples: at most 64 MiB a sample, of 8 GiB less 5 % and the rounding.
    memory = MemoryModel(capacity_bytes=8 * GIB)
    memory.observe(64, 4 * GIB)
    assert memory.largest_size() == (8 * GIB * 95 // 100 - ROUNDING_BYTES) // (64 * MIB) == 121


def test_far_from_the_data_it_goes_by_doubling():
    memory = MemoryModel(capacity_bytes=64 * GIB)
    for size in (4, 8, 16, 32):
        memory.observe(size, GIB + size * MIB)
        assert memory.largest_size() == 2 * size


def test_a_size_that_ran_stays_allowed_however_tight():
    memory = MemoryModel(capacity_bytes=8 * GIB)
    memory.observe(100, 8 * GIB - 1)
    assert memory.largest_size() == 100


def test_a_size_that_failed_is_ruled_out_for_good():
    memory = MemoryModel(capacity_bytes=8 * GIB)
    memory.out_of_memory(100)
    assert memory.largest_size() == 95
    memory.observe(60, 2 * GIB)
    assert memory.largest_size() == 95
    memory.observe(98, 3 * GIB)
    assert memory.largest_size() == 98
    memory.observe(100, 3 * GIB)
    memory.observe(120, 3 * GIB)
    assert memory.largest_size() == 98
    memory.out_of_memory(110)
    assert memory.largest_size() == 98
    memory.out_of_memory(40)
    assert memory.largest_size() == 38


def test_where_not_even_one_sample_fits_the_limit_is_zero():
    memory = MemoryModel(capacity_bytes=GIB)
    memory.out_of_memory(1)
    assert memory.largest_size() == 0


def test_peaks_that_fall_with_the_size_are_put_up_with():
    # The first iteration chose its kernels with a large workspace; the peaks after it are lower.
    memory = MemoryModel(capacity_bytes=16 * GIB)
    memory.observe(32, 9 * GIB)
    memory.observe(64, 5 * GIB)
    # 80 MiB a sample at the most, above the highest peak.
    highest = 16 * GIB * 95 // 100 - ROUNDING_BYTES - 9 * GIB
    assert memory.largest_size() == 32 + highest // (80 * MIB) == 111


def test_a_worse_peak_of_the_same_size_lowers_the_limit():
    memory = MemoryModel(capacity_bytes=8 * GIB, base_bytes=GIB)
    memory.observe(64, 4 * GIB)
    before = memory.largest_size()
    memory.observe(64, 5 * GIB)
    assert 64 < memory.largest_size() < before
    memory.observe(64, 4 * GIB)
    assert memory.largest_size() < before


def test_a_known_base_allows_more():
    device = Device(16 * GIB, 6 * GIB, 50 * MIB, segments=True)
    unknown = fed(model(device), device, [64]).largest_size()
    known = fed(model(device, base_known=True), device, [64]).largest_size()
    assert unknown < known <= device.limit


def test_what_is_remembered_is_bounded_and_keeps_the_ends():
    device = Device(16 * GIB, 6 * GIB, 50 * MIB, segments=False)
    memory = fed(model(device), device, [*range(40, 160), *range(1, 40)])
    sizes = [peak["samples"] for peak in memory.state_dict()["peaks"]]
    assert len(sizes) == 16
    assert (sizes[0], sizes[-1]) == (1, 159)
    assert 0.85 * device.limit <= memory.largest_size() <= device.limit


@given(devices(), st.lists(st.floats(0.01, 1.0), max_size=25), st.one_of(st.none(), st.integers(1, 5000)))
def test_a_checkpoint_goes_on_bit_for_bit(device, fractions, failed):
    memory = model(device)
    for fraction in fractions:
        fed(memory, device, [max(int(fraction * device.limit), 1)])
        resumed = model(device)
        resumed.load_state_dict(json.loads(json.dumps(memory.state_dict())))
        assert resumed.largest_size() == memory.largest_size()
        assert resumed.state_dict() == memory.state_dict()
        memory = resumed
    if failed is not None:
        memory.out_of_memory(failed)
        resumed = model(device)
        resumed.load_state_dict(json.loads(json.dumps(memory.state_dict())))
        assert resumed.largest_size() == memory.largest_size() < failed
