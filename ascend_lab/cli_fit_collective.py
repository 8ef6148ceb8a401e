"""The verb `ascend-lab fit-collective`: latency and rate from measured all-reduces."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import InputError

if TYPE_CHECKING:
    from ascend_lab.cluster.fit import Band, CollectiveFit, HeldOut, Measured

Emit = Callable[[str | None, Any, str], None]


def add_fit_collective(verbs: Any, emit: Emit) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("fit-collective", help="alpha and beta from measured all-reduces")
    verb.add_argument("file", metavar="TABLE.csv", help="columns bytes, ranks, time_s")
    verb.add_argument("--device", metavar="D", help="rows with this in the column device")
    verb.add_argument("--max-ranks", type=int, metavar="P", help="rows of at most P ranks")
    verb.add_argument("--json", metavar="F", help="write JSON to F, or print it with -")
    verb.set_defaults(run=lambda arguments: _fit_collective(arguments, emit))


def _fit_collective(arguments: argparse.Namespace, emit: Emit) -> int:
    from ascend_lab.cluster.fit import fit_collective, held_out
    from ascend_lab.cluster.tables import read_table

    if arguments.max_ranks is not None and arguments.max_ranks < 2:
        raise InputError("--max-ranks of at least 2", str(arguments.max_ranks))
    rows = read_table(arguments.file, device=arguments.device, max_ranks=arguments.max_ranks)
    fit = fit_collective(rows)
    data = report(rows, fit, held_out(rows), held_out(rows, "ranks"))
    emit(arguments.json, data, _text(data))
    return 0


def report(
    rows: list[Measured], fit: CollectiveFit, by_size: list[HeldOut], by_ranks: list[HeldOut]
) -> dict[str, Any]:
    """Return the fit and its errors on left-out sizes and counts of ranks, in all and per band.

    `held_out_mape` is on left-out sizes, on left-out ranks where the table has one size only.
    """
    from ascend_lab.cluster.fit import mape, predicted

    def errors(judged: list[HeldOut], keep: Callable[[Measured], bool]) -> float | None:
        return mape(item for item in judged if keep(item.row))

    def band_errors(band: Band) -> dict[str, Any]:
        def inside(row: Measured) -> bool:
            return fit.band_of(row.size_bytes) is band

        return {
            "rows": sum(map(inside, rows)),
            "held_out_mape": errors(by_size, inside),
            "held_out_mape_ranks": errors(by_ranks, inside),
        }

    def size_errors(size: float) -> dict[str, Any]:
        return {
            "bytes": size,
            "held_out_mape": errors(by_size, lambda row: row.size_bytes == size),
            "held_out_mape_ranks": errors(by_ranks, lambda row: row.size_bytes == size),
        }

    return {
        "bands": [
            {
                "bytes_from": band.bytes_from,
                "bytes_to": band.bytes_to,
                "alpha_s": band.alpha_s,
                "beta_s_per_byte": band.beta_s_per_byte,
                **band_errors(band),
            }
            for band in fit.bands
        ],
        "held_out_mape": mape(by_size or by_ranks),
        "held_out_mape_ranks": mape(by_ranks),
        "fit_mape": mape(predicted(fit, row) for row in rows),
        "rows": len(rows),
        "sizes": [size_errors(size) for size in sorted({row.size_bytes for row in rows})],
    }


def _text(data: dict[str, Any]) -> str:
    lines = [f"ring law fitted to {data['rows']} rows; errors on sizes / ranks left out"]
    for band in data["bands"]:
        beta = band["beta_s_per_byte"]
        rate = f"{1e-9 / beta:.2f} GB/s" if beta else "no limit"
        lines.append(
            f"  {band['bytes_from']:.3g} to {band['bytes_to']:.3g} B: "
            f"alpha {band['alpha_s'] * 1e6:.2f} us, 1/beta {rate}, error {_both(band)}"
        )
    lines += [f"    {size['bytes']:12.0f} B: {_both(size)}" for size in data["sizes"]]
    lines.append(f"  in all {_both(data)}; on the rows fitted {_percent(data['fit_mape'])}")
    return "\n".join(lines)


def _both(errors: dict[str, Any]) -> str:
    return f"{_percent(errors['held_out_mape'])} / {_percent(errors['held_out_mape_ranks'])}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
