"""Lines of a script, and the words that the real sbatch took from them."""

from __future__ import annotations

# tests/cluster asks sbatch again.
MEASURED = [
    (r'#SBATCH --comment="a b"', ["--comment=a b"]),
    (r"#SBATCH --comment='a b'", ["--comment=a b"]),
    (r'#SBATCH --comment="a\"b"', ['--comment=a"b']),
    (r"#SBATCH --comment='a\'b'", ["--comment=a'b"]),
    (r"#SBATCH --comment='a\nb'", ["--comment=anb"]),
    (r'#SBATCH --comment="a\ b"', ["--comment=a b"]),
    (r"#SBATCH --comment=a\ --time=5", ["--comment=a", "--time=5"]),
    (r"#SBATCH --comment=\\\ --time=5", ["--comment=\\", "--time=5"]),
    ("#SBATCH --comment=a\\", ["--comment=a"]),
    (r"#SBATCH --comment=a#b", ["--comment=a"]),
    (r"#SBATCH --comment=a #b", ["--comment=a"]),
    (r'#SBATCH --comment="a#b"', ["--comment=a#b"]),
    (r"#SBATCH --comment=\#b", ["--comment=#b"]),
    (r'#SBATCH --comment="$HOME`id`$(id)"', ["--comment=$HOME`id`$(id)"]),
    (r'#SBATCH --comment="a"b"c d"', ["--comment=abc d"]),
    (r"""#SBATCH --comment=""'x'y""", ["--comment=xy"]),
    (r"""#SBATCH --comment="it's" """, ["--comment=it's"]),
    (r'#SBATCH "--comm"ent=a "--time=5"', ["--comment=a", "--time=5"]),
    ("#SBATCH --comment=a\t--time=5", ["--comment=a", "--time=5"]),
    ("#SBATCH --comment=a\f--time=5", ["--comment=a", "--time=5"]),
    ("#SBATCH --comment=a\x1cb", ["--comment=a\x1cb"]),
    ("#SBATCH --comment=a\xa0b", ["--comment=a\xa0b"]),
    ("#SBATCH\t--comment=a", ["--comment=a"]),
    ("#SBATCH--comment=a", ["--comment=a"]),
    ('#SBATCH"--comment=a"', ["--comment=a"]),
    ('#SBATCH "" --comment=a', []),
    ("#SBATCH#--comment=a", []),
    ("#SBATCH", []),
    (" #SBATCH --comment=a", None),
    ("#sbatch --comment=a", None),
    ("##SBATCH --comment=a", None),
    ("# SBATCH --comment=a", None),
]

# What Slurm 24.05 and later read otherwise: a backslash makes the blank behind it a part of the word.
MEASURED_SINCE_24_05 = {
    r"#SBATCH --comment=a\ --time=5": ["--comment=a --time=5"],
    r"#SBATCH --comment=\\\ --time=5": ["--comment=\\ --time=5"],
}
