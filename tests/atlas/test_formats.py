"""What the atlas says of formats and of other libraries, and the scripts that show it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "findings"


def test_each_finding_is_cited_with_the_version_that_it_shows():
    """The scripts run outside the suite; here are their names and versions."""
    text = (ROOT / "book" / "atlas.md").read_text(encoding="utf-8")
    cited = re.findall(r"findings/([a-z0-9-]+)\.sh", text)
    assert {*cited} <= {path.stem for path in FINDINGS.glob("*.sh")}
    bullets = re.findall(r"^- (\*\*.+)$", text, re.M)
    assert len(bullets) >= 13
    for bullet in bullets:
        [name] = re.findall(r"findings/([a-z0-9-]+)\.sh", bullet)
        script = (FINDINGS / f"{name}.sh").read_text(encoding="utf-8")
        headline = script.splitlines()[1]
        for version in re.findall(r"\*\*([\w.-]+ [\d.]+)\*\*", bullet):
            assert version in headline
            package, number = version.split()
            assert f"{package}=={number}" in script or f"{package}==$version" in script
