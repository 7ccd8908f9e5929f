"""The tables of README.md and docs/performance.md, from benchmarks/results/*.json.

python -m benchmarks.tables            writes them between the markers, and docs/images/speed.svg
python -m benchmarks.tables --check    only says whether they are up to date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_static

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
OWN = "jaxinfer"
Record = dict[str, Any]


def load_results(folder: Path = RESULTS) -> dict[str, Record]:
    """Returns every result by the name of its file; ValueError names one that no table is known for."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for name, record in found.items():
        if record.get("benchmark") not in SECTIONS and not _is_flat(record):
            raise ValueError(f"results/{name}.json: no table is known for {record.get('benchmark')!r}")
    return found


def readme_block(results: dict[str, Record]) -> str:
    """Returns what stands between the README's markers: speed, for each model under its newest jax."""
    newest = newest_end_to_end(results)
    return "\n\n".join(f"{_title(r)}\n\n{_speed(r)}\n\n{_foot(r)}" for r in newest.values())


def newest_end_to_end(results: dict[str, Record]) -> dict[str, Record]:
    """Returns the end-to-end result of each model under its newest jax, by the model's name."""
    newest: dict[str, Record] = {}
    for record in results.values():
        if record.get("benchmark") == "end_to_end":
            held = newest.get(record["model"])
            if held is None or _age(held) < _age(record):
                newest[record["model"]] = record
    return dict(sorted(newest.items()))


def performance_block(results: dict[str, Record]) -> str:
    """Returns what stands between the markers of docs/performance.md: every result, in full."""
    parts = []
    for name, record in results.items():
        section = SECTIONS.get(record["benchmark"], _flat_section)
        parts.append(f"### {name}\n\n{section(record)}")
    return "\n\n".join(parts)


def with_block(text: str, block: str) -> str:
    """Returns the text with `block` between its markers; ValueError unless it has exactly one pair."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ValueError(f"the text must hold {BEGIN} and {END} once each, in that order")
    return head + BEGIN + "\n" + (block + "\n" if block else "") + END + tail


def _end_to_end(record: Record) -> str:
    parts = [
        _title(record),
        _speed(record),
        _contexts(record),
        _start(record),
        _memory(record),
        _limits(record),
        _foot(record),
    ]
    return "\n\n".join(part for part in parts if part)


def _claims(record: Record) -> str:
    """Claims with bounds: what was measured, beside what is asked of it."""
    rows = [[claim["what"], _claim_value(claim), _claim_bound(claim)] for claim in record["claims"]]
    title = f"{record['model']}, {record['dtype']}; {_machine(record)}"
    return f"{title}\n\n{_table(['', 'measured', 'bound'], rows)}\n\n{_foot(record)}"


def _gpu_static(record: Record) -> str:
    heading = f"Compiled for an {record['target']} that is not there, bfloat16; jax {record['jax']}"
    return f"{heading}\n\n{gpu_static.table(record['cases'])}"


SECTIONS: dict[str, Callable[[Record], str]] = {
    "end_to_end": _end_to_end,
    "chat_reuse": _claims,
    "kv_eviction": _claims,
    "gated_delta": _claims,
    "vision": _claims,
    "gpu_static": _gpu_static,
}


def _claim_value(claim: Record) -> str:
    value = claim["value"]
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.2f}{claim['unit']}"


def _claim_bound(claim: Record) -> str:
    kind, bound = claim["bound"]
    return {"reported": "-", "equals": "must hold"}.get(kind) or f"{kind} {bound:g}{claim['unit']}"


def _is_flat(record: Record) -> bool:
    """True for what single operations print: `results`, a list of flat objects."""
    rows = record.get("results")
    return "benchmark" in record and isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def _flat_section(record: Record) -> str:
    rows = record["results"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    facts = {key: value for key, value in record.items() if not isinstance(value, dict | list)}
    said = "; ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    return f"{said}\n\n{_table(columns, [[str(row.get(key, '-')) for key in columns] for row in rows])}"


def _speed(record: Record) -> str:
    """Tokens per second of every contender, and how many times as fast ours are as the best peer."""
    cells = record["cells"]
    names = list(dict.fromkeys(name for cell in cells for name in cell["results"]))
    rows = [[_label(name), *(_rate(cell, name) for cell in cells)] for name in names]
    for kind, said in (("same_dtype", "best peer of its dtype"), ("any", "best peer")):
        for name in (name for name in names if any(kind in _ratio(cell, name) for cell in cells)):
            ratios = [_ratio(cell, name).get(kind, {}).get("times_as_fast") for cell in cells]
            shown = ["-" if value is None else f"**{value:.2f}x**" for value in ratios]
            rows.append([f"{_label(name)} against the {said}", *shown])
    return _table(["tokens/s", *map(_heading, cells)], rows)


def _ratio(cell: Record, name: str) -> Record:
    return cell["ratios"].get(name, {})


def _rate(cell: Record, name: str) -> str:
    result = cell["results"].get(name)
    if result is None:
        return "-"
    return f"{result['tokens_per_s']:,.0f}" + ("*" if result["disturbed_samples"] else "")


def _heading(cell: Record) -> str:
    if cell["measure"] == "prefill":
        return f"prefill {cell['tokens']:,}"
    return f"decode x{cell['batch']} at {cell['context']:,}"


def _contexts(record: Record) -> str:
    """Time of a decode step by context, and the growth from the shortest to the longest."""
    cells = [cell for cell in record["cells"] if cell["measure"] == "decode"]
    contexts = sorted({cell["context"] for cell in cells})
    if len(contexts) < 2:
        return ""
    rows = []
    for batch in sorted({cell["batch"] for cell in cells}):
        at = {cell["context"]: cell for cell in cells if cell["batch"] == batch}
        for name in dict.fromkeys(name for cell in at.values() for name in cell["results"]):
            if all(context in at and name in at[context]["results"] for context in contexts):
                times = [_step_ms(at[context], name) for context in contexts]
                growth = f"{times[-1] / times[0]:.2f}x"
                rows.append([_label(name), str(batch), *(f"{time:.1f}" for time in times), growth])
    return _table(["ms a step", "batch", *(f"at {c:,}" for c in contexts), "growth"], rows)


def _step_ms(cell: Record, name: str) -> float:
    return cell["results"][name]["median_ms"] / cell["steps"]


def _start(record: Record) -> str:
    start = record.get("start")
    if start is None:
        return ""
    rows = [[_label(name), f"{run['median_s']:.2f}"] for name, run in start["starts"].items()]
    kept = f"A cold start leaves {start['programs_kept']} compiled programs in the cache."
    header = ["start to first token, " + start["dtype"], "s"]
    return _table(header, rows) + "\n\n" + kept


def _memory(record: Record) -> str:
    rows = []
    for name, facts in record["contenders"].items():
        generate = facts.get("generate")
        if generate is None:
            continue
        compiles, peak = generate.get("compiles"), generate["peak_above_imports_bytes"]
        shown = "-" if peak is None else f"{peak / 2**20:,.0f}"
        counts = (str(compiles["programs"]), f"{compiles['compile_s']:.1f}") if compiles else ("-", "-")
        host = facts.get("host_overhead_us")
        rows.append(
            [_label(name), f"{facts['load_s']:.2f}", shown, *counts, "-" if host is None else f"{host:.0f}"]
        )
    header = ["load and generate", "load s", "peak MiB above the imports'", "programs compiled", "compile s"]
    header.append("host us a token")
    return _table(header, rows) if rows else ""


def _limits(record: Record) -> str:
    """What the machine can do, and how near to reading every weight once a decode step of one row comes."""
    limits = record.get("limits")
    if limits is None:
        return ""
    names = {"copy_gb_s": "copy, GB/s read and written", "read_gb_s": "read, GB/s"}
    names |= {f"matmul_{dtype}_gflop_s": f"{dtype} matmul, GFLOP/s" for dtype in ("float32", "bfloat16")}
    rows = [[said, f"{limits[key]:,.0f}"] for key, said in names.items()]
    for cell in (cell for cell in record["cells"] if cell["measure"] == "decode" and cell["batch"] == 1):
        for name in (name for name in cell["results"] if "params_bytes" in record["contenders"][name]):
            rate = record["contenders"][name]["params_bytes"] / (1e6 * _step_ms(cell, name))
            shown = f"{rate:.1f} ({rate / limits['read_gb_s']:.0%} of reading)"
            rows.append([f"{_label(name)}: weights read, {_heading(cell)}, GB/s", shown])
    return _table(["limits of the machine", ""], rows)


def _title(record: Record) -> str:
    return f"**{record['model']}** (`{record['file']}`); {_machine(record)}"


def _machine(record: Record) -> str:
    environment = record["environment"]
    return f"{environment['cpu']}, {environment['threads']} threads; {_versions(record)}"


def _versions(record: Record) -> str:
    versions: dict[str, str] = {}
    for facts in record["contenders"].values():
        built = f" ({facts['build']})" if "build" in facts else ""
        versions |= {name: version + built for name, version in facts["versions"].items()}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name != "jaxlib")


def _foot(record: Record) -> str:
    environment, settings = record["environment"], record["settings"]
    commit = (environment["commit"] or "unknown")[:7]
    changed = " with changes" if environment["library_changed_since"] else ""
    parts = [
        f"{environment['date']}, commit {commit}{changed}, malloc: {environment['malloc']}, "
        f"medians of {settings['repeats']} interleaved rounds"
    ]
    loads = list(_foreign_loads(record))
    if loads:
        parts.append(f"other processes used at most {max(loads):.2f} cores")
    if any(
        result["disturbed_samples"] for cell in record.get("cells", ()) for result in cell["results"].values()
    ):
        parts.append(f"* disturbed: others used more than {settings['max_foreign_load']} cores in a sample")
    return "; ".join(parts) + "."


def _foreign_loads(record: Record) -> Iterable[float]:
    for cell in record.get("cells", ()):
        for result in cell["results"].values():
            if result["foreign_load"] is not None:
                yield result["foreign_load"]
    if record.get("foreign_load") is not None:
        yield record["foreign_load"]


def _age(record: Record) -> tuple[tuple[int, ...], str]:
    """Orders results of one model: by jax, then by date."""
    version = next(f["versions"]["jax"] for f in record["contenders"].values() if f["library"] == OWN)
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    return numbers, record["environment"]["date"]


def _label(name: str) -> str:
    return name.replace("/", " ")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


IMAGE = Path("docs") / "images" / "speed.svg"


def pages(results: dict[str, Record], root: Path = ROOT) -> dict[Path, str]:
    """Returns the files that hold tables, with the text that the results give them."""
    blocks = {root / "README.md": readme_block, root / "docs" / "performance.md": performance_block}
    return {path: with_block(path.read_text(), block(results)) for path, block in blocks.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a table is out of date"
    )
    args = parser.parse_args(argv)
    results = load_results()
    stale = {path: text for path, text in pages(results).items() if path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'out of date' if args.check else 'written'}", file=sys.stderr)
        if not args.check:
            path.write_text(text)
    if not args.check:
        from benchmarks.plots import draw_speed

        draw_speed(newest_end_to_end(results), ROOT / IMAGE)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
