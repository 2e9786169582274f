"""Text that a shell, sbatch or a template could take for more than text."""

from __future__ import annotations

from hypothesis import strategies as st

# The file that a payload makes where a shell runs it.
MARKER = "marker-of-a-payload"
PAYLOADS = st.sampled_from(
    [
        f"$(touch {MARKER})",
        f"`touch {MARKER}`",
        f"'; touch {MARKER}; '",
        f'"; touch {MARKER}; "',
        f"a; touch {MARKER} #",
        f"& touch {MARKER} &",
        f"x | touch {MARKER}",
        f"\\'; touch {MARKER} #",
        f"${{x:=$(touch {MARKER})}}",
        f">{MARKER}",
        f"HPCDDP_JOB ) ; touch {MARKER}",
        "#SBATCH --comment=injected",
        "--comment=injected",
        "%j%x%%",
        "~",
        "*",
        "!!",
        "{{ 7 * 7 }}{% raw %}",
        "\\",
        "'",
        '"',
        "\x01\x7f",
        " leading and trailing ",
    ]
)
LINE = (PAYLOADS | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), min_size=1)).filter(
    lambda text: bool(text.strip())
)
TEXT = PAYLOADS | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
