"""The verb `ascend-lab fit-collective`: latency and rate from measured all-reduces."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ascend_lab.cli_common import add_json, emit
from ascend_lab.errors import InputError
from ascend_lab.limits import count

if TYPE_CHECKING:
    from ascend_lab.cluster.fit import CollectiveFit, Measured


def add_fit_collective(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("fit-collective", help="alpha and beta from measured all-reduces")
    verb.add_argument("file", metavar="TABLE.csv", help="columns bytes, ranks, time_s")
    verb.add_argument("--device", metavar="D", help="rows with this in the column device")
    verb.add_argument("--max-ranks", type=count, metavar="P", help="rows of at most P ranks")
    add_json(verb)
    verb.set_defaults(run=_fit_collective)


def _fit_collective(arguments: argparse.Namespace) -> int:
    from ascend_lab.cluster.fit import fit_collective
    from ascend_lab.cluster.tables import read_table

    if arguments.max_ranks is not None and arguments.max_ranks < 2:
        raise InputError("--max-ranks of at least 2", str(arguments.max_ranks))
    rows = read_table(arguments.file, device=arguments.device, max_ranks=arguments.max_ranks)
    data = report(rows, fit_collective(rows))
    emit(arguments.json, data, _text(data))
    return 0


def report(rows: list[Measured], fit: CollectiveFit) -> dict[str, Any]:
    """Return the fit and its errors on left-out sizes and counts of ranks: all, per band and size.

    Errors on sizes are those on counts of ranks where the table has one size only; None where
    nothing can be left out.
    """
    from ascend_lab.cluster.fit import held_out, mape, predicted

    by_ranks = held_out(rows, "ranks")
    judged = {"held_out_mape": held_out(rows) or by_ranks, "held_out_mape_ranks": by_ranks}
    sizes = sorted({row.size_bytes for row in rows})

    def errors(chosen: list[float]) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": sum(row.size_bytes in chosen for row in rows)}
        for name, items in judged.items():
            found[name] = mape(item for item in items if item.row.size_bytes in chosen)
        return found

    return {
        "bands": [
            {
                "bytes_from": band.bytes_from,
                "bytes_to": band.bytes_to,
                "alpha_s": band.alpha_s,
                "beta_s_per_byte": band.beta_s_per_byte,
                **errors([size for size in sizes if fit.band_of(size) is band]),
            }
            for band in fit.bands
        ],
        **errors(sizes),
        "fit_mape": mape(predicted(fit, row) for row in rows),
        "sizes": [{"bytes": size, **errors([size])} for size in sizes],
    }


def _text(data: dict[str, Any]) -> list[str]:
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
    return lines


def _both(errors: dict[str, Any]) -> str:
    return f"{_percent(errors['held_out_mape'])} / {_percent(errors['held_out_mape_ranks'])}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
