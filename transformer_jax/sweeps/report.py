"""The report of a sweep: tables, figures and a verdict, in the folder report/ of its directory."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from transformer_jax.analysis.sweep_figures import Bar, Curve, draw_bars, draw_heat_map, draw_sweep_curves
from transformer_jax.errors import UserError
from transformer_jax.sweeps import tables
from transformer_jax.sweeps.plan import read_sweep
from transformer_jax.sweeps.results import Arm, SweepResults, read_results

REPORT_FOLDER = 'report'
DOCS_PAGE, DOCS_FOLDER = 'ablations.md', 'ablations'

PAGE_HEAD = """\
# Ablations

Each section is what its command wrote; tables in CSV and LaTeX and figures in PDF lie beside the pictures. How a sweep
is defined, run in parts and continued: `python -m experiments.ablate --help`.
"""


def write_report(workdir: Path) -> str:
    """Writes report/table.{md,csv,tex}, report/*.{png,pdf} and report/report.md, and returns the last one's text.

    Raises:
      UserError: if no run of the sweep is finished.
    """
    results = read_results(workdir)
    if not any(arm.finished for arm in results.arms):
        raise UserError(f"no run of the sweep in '{workdir}' is finished; run it without --report first")
    folder = Path(workdir) / REPORT_FOLDER
    folder.mkdir(exist_ok=True)
    for name, text in (('md', tables.markdown), ('csv', tables.comma_separated), ('tex', tables.latex)):
        (folder / f'table.{name}').write_text(text(results))
    pictures = draw(results, folder)
    text = '\n'.join([
        f'# {results.description["title"]}\n', tables.markdown(results), ' '.join(tables.verdict(results)) + '\n',
        *(f'- {line}' for line in tables.notes(results)), '',
        *(f'![{name.replace("_", " ")}]({name}.png)' for name in pictures),
    ]) + '\n'  # fmt: skip
    (folder / 'report.md').write_text(text)
    return text


def draw(results: SweepResults, folder: Path) -> list[str]:
    """Draws the figures of a sweep as PNG and PDF and returns their names."""
    title, arms = results.description['title'], [arm for arm in results.arms if arm.finished]
    curves = [Curve(arm.name, tuple(run.curve for run in arm.finished)) for arm in arms]
    draw_sweep_curves(title, curves, folder / 'curves')
    panels = {'validation perplexity': [_bar(arm, 'perplexity', results) for arm in arms]}
    if any(not math.isnan(arm.bleu.mean) for arm in arms):
        panels['validation BLEU'] = [_bar(arm, 'bleu', results) for arm in arms]
    draw_bars(title, panels, folder / 'bars')
    names = ['curves', 'bars']
    if results.description['heat_map'] is not None:
        rows, columns = results.description['heat_map']
        cells = {(arm.overrides[rows], arm.overrides[columns]): _cell(arm) for arm in results.arms}
        draw_heat_map(title, rows.rpartition('.')[2], columns.rpartition('.')[2], cells, 'validation perplexity',
                      folder / 'heat_map')  # fmt: skip
        names.append('heat_map')
    return names


def _bar(arm: Arm, name: str, results: SweepResults) -> Bar:
    found = getattr(arm, name)
    return Bar(
        arm.name, found.mean, found.half, tuple(getattr(run, name) for run in arm.finished), arm is results.baseline
    )


def _cell(arm: Arm) -> tuple[float, str]:
    """Returns an arm's number and its text in the map, which names runs that diverged."""
    text: Any = f'{arm.perplexity.mean:.1f}' if arm.finished else ''
    lost = f'{arm.diverged} of {len(arm.runs)}\ndiverged' if arm.diverged else ''
    return arm.perplexity.mean, '\n'.join(part for part in (text, lost) if part)


def publish(workdir: Path, docs: Path, machine: str) -> Path:
    """Copies the report of a sweep to docs/ablations/<name>/ and renews docs/ablations.md, the page of all such copies.

    Args:
      machine: what the runs were made on, in words.
    """
    name, target = read_sweep(workdir)['name'], Path(docs) / DOCS_FOLDER
    folder = target / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (Path(workdir) / REPORT_FOLDER).iterdir():
        shutil.copy(file, folder / file.name)
    command = f'python -m experiments.ablate --sweep={name} --docs={Path(docs).name} --machine="{machine}"'
    text = (folder / 'report.md').read_text()
    title, _, body = text.partition('\n')
    (folder / 'report.md').write_text(f'{title}\n\n```bash\n{command}\n```\n\nMachine: {machine}.\n{body}')
    sections = []
    for report in sorted(target.glob('*/report.md')):
        section = report.read_text().replace('](', f']({DOCS_FOLDER}/{report.parent.name}/')
        sections.append(f'#{section}')
    page = Path(docs) / DOCS_PAGE
    page.write_text('\n'.join([PAGE_HEAD, *sections]))
    return page
