"""Write the report's folder in one step."""

from pathlib import Path

from modicum.recipe import Recipe, resolved_yaml
from modicum.road.report.gather import gather
from modicum.road.report.page import render_page
from modicum.road.report.plots import stage_pictures
from modicum.store import RunDirectory, atomic_directory, write_bytes, write_json, write_text


def write_report(run: RunDirectory, recipe: Recipe, *, code_version: str) -> Path:
    """Write report/index.html, report/report.json and the plots as PNG files; returns the page's path.

    The page holds its plots itself and asks nothing of the network. Sections of what the run did not do are left out.
    """
    figures = gather(run, recipe, code_version=code_version)
    pictures = {stage: stage_pictures(stage, figures["training"][stage]["curve"]) for stage in figures["training"]}
    folder = run.path / "report"
    with atomic_directory(folder) as work:
        write_json(work / "report.json", figures)
        for picture in (picture for group in pictures.values() for picture in group):
            write_bytes(work / f"{picture.name}.png", picture.png)
        write_text(work / "index.html", render_page(figures, pictures, resolved_yaml(recipe)))
    return folder / "index.html"
