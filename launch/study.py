"""The folder of a study, docs/studies/NAME: its report, the sweep's files, and README.md.

README.md is written by people, apart from the part between two marks, which every report writes again.
So a study that runs in parts can be shown as soon as its first runs have ended: what is missing is in
the report.
"""

import shutil
from pathlib import Path

from launch.sweep import Sweep, SweepError
from shards.files import write_whole

BEGIN, END = "<!-- written by launch/report.py -->", "<!-- end of what it writes -->"
NEW = """# {name}

What it asks, and what came out of it: write it here.

"""


def write_study(out: Path, sweep: Sweep, report: str) -> None:
    """report: as Markdown; its headings become those below the title of the page."""
    files = [Path(sweep.path), *map(Path, sweep.runs[0].files)]
    for file in files:
        if file.resolve().parent != out.resolve():
            shutil.copyfile(file, out / file.name)
    names = ", ".join(f"[{file.name}]({file.name})" for file in files)
    about = (
        f"The page: [report.html](report.html), to be opened in a browser; every run: [runs.csv](runs.csv); "
        f"the sweep and its base: {names}."
    )
    write_whole(
        out / "README.md", updated(out / "README.md", sweep.name, f"{about}\n\n{report}").encode()
    )


def updated(path: Path, name: str, part: str) -> str:
    """The text of a README with another part between the marks; SweepError if a mark is missing."""
    text = path.read_text(encoding="utf-8") if path.exists() else NEW.format(name=name)
    if BEGIN not in text and END not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SweepError(
            [f"README.md has one of the marks {BEGIN} and {END} without the other"], path
        )
    return f"{before}{BEGIN}\n\n{part.rstrip()}\n\n{END}{after}"
