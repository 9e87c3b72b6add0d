"""The replay reads a Dockerfile as an engine would, and refuses what it does not understand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.replay_dockerfile import Image, ReplayError, Step, carry_out, parse

TEXT = """# a comment
FROM python:3.11.13-slim-bookworm AS first
ENV A=1 \\
    B="two words"
# in between
RUN one \\
    && two

FROM first
COPY --from=first --chmod=0755 /a /b/
CMD ["x", "y"]
"""


def test_stages_and_continued_lines():
    stages = parse(TEXT)
    assert list(stages) == ["first", "1"]
    assert stages["first"].steps == [Step("ENV", 'A=1 B="two words"'), Step("RUN", "one && two")]
    assert stages["1"].base == "first"
    assert stages["1"].steps == [Step("COPY", "--from=first --chmod=0755 /a /b/"), Step("CMD", '["x", "y"]')]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("RUN x", "RUN comes before FROM"),
        ("FROM a\nADD x y", "ADD is not understood"),
        ("FROM --platform=x a AS b", "is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(text, told):
    with pytest.raises(ReplayError, match=told):
        parse(text)


def image(tmp_path: Path) -> Image:
    return Image(tmp_path, {"PATH": "/bin"})


def test_settings_of_an_image(tmp_path):
    of = image(tmp_path)
    for keyword, text in (
        ("ENV", 'PATH=/opt/bin:$PATH A="two words"'),
        ("WORKDIR", "/data"),
        ("USER", "10001:10001"),
        ("ENTRYPOINT", '["postdate-broker"]'),
        ("CMD", '["serve"]'),
        ("HEALTHCHECK", '--interval=10s CMD ["python", "-c", "x"]'),
        ("EXPOSE", "7650"),
    ):
        carry_out(Step(keyword, text), of, {})
    assert of.environ == {"PATH": "/opt/bin:/bin", "A": "two words"}
    assert (of.folder, of.user, of.entrypoint, of.command) == (
        "/data",
        "10001:10001",
        ["postdate-broker"],
        ["serve"],
    )
    assert of.healthcheck == ["python", "-c", "x"]
    assert (tmp_path / "data").is_dir()


def test_copies_from_a_stage(tmp_path):
    source, to = image(tmp_path / "a"), image(tmp_path / "b")
    (source.root / "tree").mkdir(parents=True)
    (source.root / "tree/script").write_text("#!/bin/sh\n")
    to.root.mkdir()
    carry_out(Step("COPY", "--from=first /tree /opt/tree"), to, {"first": source})
    carry_out(Step("COPY", "--from=first --chmod=0755 /tree/script /usr/bin/script"), to, {"first": source})
    assert (to.root / "opt/tree/script").read_text() == "#!/bin/sh\n"
    assert (to.root / "usr/bin/script").stat().st_mode & 0o777 == 0o755
    with pytest.raises(ReplayError, match="link"):
        carry_out(Step("COPY", "--link x y"), to, {})
