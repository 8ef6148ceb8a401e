"""Times one step of a language model on a machine, with a ledger: the seconds of each cause.

The kernels of a layer run one after another on every device. After attention and after the
feed-forward part, the devices of a group add up their results. So

    step = sum over layers of (kernels + gaps + collectives) + head

The ledger divides that sum into entries:

    weights, cache   bytes that kernels fetch of them / rate of memory
    cube, vector     the other seconds of the kernels on each kind of core
    starts           starts of tasks on the device
    gaps             waits between two tasks (see `machine`)
    links            collectives between devices
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascend_lab.errors import CapacityError, InputError, UnsupportedError
from ascend_lab.llm.formats import WIDE_BYTES, Call, Caller, Format, format_of
from ascend_lab.llm.layer import LayerCalls
from ascend_lab.llm.machine import GAPS, Machine
from ascend_lab.llm.memory import Memory, memory_of
from ascend_lab.llm.models import Decoder, GroupedAttention
from ascend_lab.llm.plan import Load, Plan, shard_of
from ascend_lab.llm.times import KernelTimer

LEDGER = ("weights", "cache", "cube", "vector", "starts", "gaps", "links")
PRODUCT_PIECES = 3
"""Pieces of a product whose results are all-reduced piece by piece while the next is computed.

A product of 371.6 us and an all-reduce of 437.3 us took 560.6 us as one kernel, about 437.3 +
371.6 / 3. Source: hw-native-sys/pto-isa @3186c381, gemm_ar, 8 x 910B.
"""
SMALLEST_CUT_BYTES = 1 << 20
"""Results smaller than this are not cut: latency would dominate each message (assumed)."""
BOTTLENECK_TEXTS: Mapping[str, str] = {
    "weights": "reading weights from memory: more sequences a step share that read",
    "cache": "reading the cache from memory: shorter contexts or more devices help",
    "cube": "products on the cube: fewer tokens a step, 8 bits or more devices help",
    "vector": "vector kernels: fewer tokens a step or more devices help",
    "starts": "starts of small kernels: more work a kernel, or fewer kernels, help",
    "gaps": "waits between kernels: graph mode or fewer kernels help",
    "links": "collectives between devices: fewer devices a group help",
}
"""Entry of the ledger -> what limits a step if it is the largest, and what helps."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of timing a step: its ledger, a lower bound of its time, and a device's memory."""

    decoder: Decoder
    plan: Plan
    load: Load
    number_format: Format
    ledger: Mapping[str, float]
    kernels: int
    bound_s: float
    memory: Memory

    @property
    def time_s(self) -> float:
        """Return the seconds of the step: the sum of its ledger."""
        return sum(self.ledger.values())

    @property
    def tokens_per_s(self) -> float:
        """Return the new tokens of all sequences per second."""
        return self.load.batch * self.load.tokens / self.time_s

    @property
    def bottleneck(self) -> str:
        """Return a sentence that names the largest entry of the ledger and a remedy."""
        largest = max(LEDGER, key=lambda entry: self.ledger[entry])
        share = self.ledger[largest] / self.time_s
        return f"{share:.0%} of the step is {BOTTLENECK_TEXTS[largest]}"

    def as_dict(self) -> dict[str, Any]:
        """Return the step as plain data."""
        return {
            "time_s": self.time_s,
            "tokens_per_s": self.tokens_per_s,
            "kernels": self.kernels,
            "bound_s": self.bound_s,
            "ledger": dict(self.ledger),
            "bottleneck": self.bottleneck,
        }


class Model:
    """A decoder in a number format, divided by a plan over a machine; `step` times its steps."""

    def __init__(
        self,
        decoder: Decoder,
        machine: Machine,
        plan: Plan | None = None,
        number_format: str = "",
        timer: KernelTimer | None = None,
    ) -> None:
        """Raises `InputError` for a plan that does not divide the decoder or has more devices than
        the machine, and for unknown formats.

        The `timer` of another model on the same machine can be shared: kernels are timed once.
        """
        plan = plan or Plan()
        format_name = number_format or ("bf16" if "bf16" in machine.chip.cube else "fp16")
        self.decoder = decoder
        self.machine = machine
        self.plan = plan
        self.shard = shard_of(decoder, plan)
        self.format = format_of(format_name, machine.chip)
        if self.format.cache_bytes < WIDE_BYTES and isinstance(decoder.attention, GroupedAttention):
            needed = f"a latent vector in the cache for {self.format.name}"
            raise UnsupportedError(needed, f"heads of keys of {decoder.name}", "take w8a8")
        devices = machine.topology.size if machine.topology is not None else 1
        if devices < plan.devices:
            needed = f"a machine of at least {plan.devices} devices ({plan})"
            raise InputError(needed, str(devices), "give `machine_of` the same plan")
        self.timer = timer or KernelTimer(machine.chip, machine.topology)

    def step(self, load: Load) -> Step:
        """Return the timed step of a load.

        Raises `CapacityError` if it does not fit into the devices' memory, and `InputError` for a
        context longer than the model was trained on.
        """
        positions = self.decoder.positions
        if positions and load.keys > positions:
            needed = f"a context of at most {positions} tokens for {self.decoder.title}"
            hint = "shorten it, or write a table of your own if its positions are stretched (YaRN)"
            raise InputError(needed, str(load.keys), hint)
        memory = self.memory(load)
        if not memory.fits:
            raise CapacityError(
                f"{memory.total_bytes / 2**30:.1f} GiB a device for {self.decoder.title} "
                f"({memory.weights_bytes / 2**30:.1f} of weights)",
                f"{memory.device_bytes / 2**30:.0f} GiB",
                self._remedy(memory),
            )
        return self._summed_step(load, memory)

    def time_step(self, load: Load) -> Step:
        """Return the timed step of a load, even if it does not fit into memory."""
        return self._summed_step(load, self.memory(load))

    def memory(self, load: Load) -> Memory:
        """Return the bytes of the fullest device."""
        return memory_of(self.decoder, self.plan, self.shard, load, self.format, self.machine.chip)

    def _remedy(self, memory: Memory) -> str:
        """Return a remedy for a load that does not fit."""
        if memory.largest_batch:
            return f"the largest batch that fits is {memory.largest_batch}"
        return "raise tp, pp or ep, or take a format with smaller weights"

    def calls(self, load: Load) -> list[tuple[list[Call], int]]:
        """Return lists of kernels of one device, each with the number of times that it runs."""
        layers = self._layers(load)
        dense_layers = self.decoder.dense_layers
        sparse_layers = self.decoder.layers - dense_layers
        # 61 layers, the first 3 dense: attention 61 times, dense blocks 3 times, experts 58 times
        parts = [(layers.attention(), self.decoder.layers)]
        if dense_layers:
            parts.append((layers.feed_forward(dense=True), dense_layers))
        if sparse_layers:
            parts.append((layers.feed_forward(dense=False), sparse_layers))
        parts.append((layers.head(), 1))
        return parts

    def _layers(self, load: Load) -> LayerCalls:
        """Return an object that lists the kernels of a load, layer by layer."""
        caller = Caller(self.machine.chip, self.format)
        return LayerCalls(caller, self.decoder, self.plan, self.shard, load)

    def lower_bound_s(self, load: Load) -> float:
        """Return a lower bound of the seconds of a step, without timing any kernel.

        It is the sum of all gaps and of the time to read all weights and caches at the memory's
        peak rate.
        """
        chip = self.machine.chip
        kernels = 0
        read_bytes = 0.0
        for calls, repeats in self.calls(load):
            # 20 kernels in each of 36 layers: 720 kernels, each after a gap
            kernels += repeats * len(calls)
            read_bytes += repeats * sum(call.weight_bytes + call.cache_bytes for call in calls)
        return kernels * self.machine.gap_s + read_bytes / chip.memory_peak_bytes_per_s

    def _summed_step(self, load: Load, memory: Memory) -> Step:
        """Return the step of a load: the sum of all layers, the head and the collectives."""
        account = _Account(self.timer, self.machine)
        for calls, repeats in self.calls(load):
            account.add(calls, repeats)
        self._add_links(account, self._layers(load))
        return Step(
            decoder=self.decoder,
            plan=self.plan,
            load=load,
            number_format=self.format,
            ledger={entry: account.ledger[entry] for entry in LEDGER},
            kernels=account.kernels,
            bound_s=account.bound_s(self.format),
            memory=memory,
        )

    def _add_links(self, account: _Account, layers: LayerCalls) -> None:
        """Add the collectives of all layers and of the head.

        Results of attention and of dense blocks are all-reduced over tp devices. So are the
        results of experts if there is one group; several groups send tokens to the experts and
        back.
        """
        plan = self.plan
        decoder = self.decoder
        # qwen3_8b, 32 rows: 32 * 4096 * 2 = 262 kB an all-reduce.
        sums_bytes = float(layers.rows * decoder.hidden * WIDE_BYTES)
        sparse_layers = decoder.layers - decoder.dense_layers
        # The product that ends each part of a layer, and the number of layers with that part.
        last_products = [(layers.attention()[-1], decoder.layers)]
        if decoder.dense_layers:
            last_products.append((layers.feed_forward(dense=True)[-1], decoder.dense_layers))
        if sparse_layers and plan.dp == 1:
            last_products.append((layers.feed_forward(dense=False)[-1], sparse_layers))
        for product, count in last_products:
            self._add_sums(account, product, sums_bytes, count)
        if decoder.experts is not None and plan.dp > 1:
            self._add_dispatch(account, layers, sparse_layers)
        # Each device has the scores of its own words, 2 bytes each: all scores are gathered.
        scored_rows = layers.rows if layers.load.phase == "decode" else layers.batch
        words_bytes = float(scored_rows * self.shard.words * WIDE_BYTES)
        account.add_collective("all_gather", words_bytes * plan.tp, plan.tp, 1)
        if plan.pp > 1:
            account.add_collective("all_gather", sums_bytes, 2, plan.pp - 1)

    def _add_sums(self, account: _Account, product: Call, size_bytes: float, count: int) -> None:
        """Add the all-reduce of a product's results among the tp devices of a group.

        A large product is cut into `PRODUCT_PIECES`, and a piece is sent while the next one is
        multiplied. So the shorter of the two overlaps with the longer, except for one piece:

            together = longer + shorter / PRODUCT_PIECES
        """
        sum_s, bound_s = self.timer.collective_seconds("all_reduce", size_bytes, self.plan.tp)
        visible_s = sum_s
        if size_bytes >= SMALLEST_CUT_BYTES and product.macs:
            product_s = self.timer.call_time(product).time_s
            # Product 371.6 us, sum 437.3 us: together 437.3 + 371.6 / 3 = 561.2 us; the ledger's
            # links get what the product does not hide, 561.2 - 371.6 = 189.6 us.
            together_s = max(product_s, sum_s) + min(product_s, sum_s) / PRODUCT_PIECES
            visible_s = min(sum_s, together_s - product_s)
        account.add_links(visible_s, bound_s, count)

    def _add_dispatch(self, account: _Account, layers: LayerCalls, count: int) -> None:
        """Add the messages that bring tokens to their experts and the results back.

        Each of the tp devices of a group sends its share of the group's tokens, one copy for each
        expert that a token chose; w8a8 sends one byte a number. If an expert is cut among the
        devices of a set, each of them needs all tokens that the set received and computes a part of
        each result. With one set no copies are needed, as all tokens go to it. The results of
        the shared block are added to the same share of tokens.
        """
        experts = self.decoder.experts
        assert experts is not None
        plan = self.plan
        parts = plan.expert_parts
        copies = experts.chosen if plan.ep > 1 else 1
        # 64 rows, tp 4, 8 experts a token: 16 tokens of a device go out as 128 rows.
        rows = layers.rows / plan.tp * copies
        number_bytes = 1 if self.format.in_bytes else WIDE_BYTES
        out_bytes = rows * self.decoder.hidden * number_bytes
        back_bytes = rows * self.decoder.hidden * WIDE_BYTES
        if plan.ep > 1:
            account.add_collective("all_to_all", out_bytes, plan.ep, count)
            account.add_collective("all_to_all", back_bytes, plan.ep, count)
        account.add_collective("all_gather", out_bytes * parts, parts, count)
        account.add_collective("reduce_scatter", back_bytes * parts, parts, count)
        group_bytes = float(layers.rows * self.decoder.hidden * WIDE_BYTES)
        if experts.shared_width:
            account.add_collective("reduce_scatter", group_bytes, plan.tp, count)
        account.add_collective("all_gather", group_bytes, plan.tp, count)


class _Account:
    """The running sums of a step: its ledger, kernels, bytes and multiplications."""

    def __init__(self, timer: KernelTimer, machine: Machine) -> None:
        self.timer = timer
        self.machine = machine
        self.ledger = dict.fromkeys(LEDGER, 0.0)
        self.kernels = 0
        self.read_bytes = 0.0
        self.macs = 0.0
        self.links_bound_s = 0.0

    def add(self, calls: list[Call], repeats: int) -> None:
        """Add calls, each `repeats` times."""
        rate = self.machine.chip.device_memory.rate_bytes_per_s
        for call in calls:
            call_time = self.timer.call_time(call)
            read_bytes = call.weight_bytes + call.cache_bytes
            running_s = call_time.time_s - call_time.start_s
            # A kernel of 100 us that fetches 60 MB of weights at 1200 GB/s: 50 us are booked as
            # weights, the other 50 us as cube or vector.
            fetch_s = min(running_s, read_bytes / rate)
            if read_bytes:
                weights_share = call.weight_bytes / read_bytes
                self.ledger["weights"] += repeats * fetch_s * weights_share
                self.ledger["cache"] += repeats * fetch_s * (1 - weights_share)
            unit = "vector" if call.unit == "vector" else "cube"
            self.ledger[unit] += repeats * (running_s - fetch_s)
            # in a super kernel all kernels are one task: none of them is started by itself
            if GAPS[self.machine.mode].is_task_start:
                self.ledger["starts"] += repeats * call_time.start_s
            self.ledger["gaps"] += repeats * self.machine.gap_s
            self.kernels += repeats
            self.read_bytes += repeats * read_bytes
            self.macs += repeats * call.macs

    def add_collective(self, operation: str, size_bytes: float, ranks: int, repeats: int) -> None:
        """Add a collective, `repeats` times; one rank exchanges nothing."""
        time_s, bound_s = self.timer.collective_seconds(operation, size_bytes, ranks)
        self.add_links(time_s, bound_s, repeats)

    def add_links(self, time_s: float, bound_s: float, repeats: int) -> None:
        """Add the seconds of collectives that no kernel overlaps with, and their lower bound."""
        self.ledger["links"] += repeats * time_s
        self.links_bound_s += repeats * bound_s

    def bound_s(self, number_format: Format) -> float:
        """Return a lower bound: the longest of reading at peak rate, multiplying, and messages.

        The three may overlap, so their sum would not be a lower bound.
        """
        chip = self.machine.chip
        product_format = "int8" if number_format.in_bytes else number_format.main
        memory_s = self.read_bytes / chip.memory_peak_bytes_per_s
        # Ascend910B2: 353.9 TFLOP/s in fp16, so 10^12 multiplications take 5.65 ms.
        cube_s = 2 * self.macs / chip.peak_ops_per_s(product_format)
        return max(memory_s, cube_s, self.links_bound_s)
