"""Splits the shell lines of a script into statements and simple commands, and says what each of them is for.

This is no shell: it knows quotes, comments, continuation lines, here-documents, operators and the words that open and
close compound commands. It expands nothing. The text of every statement is kept as it was written.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_ARRAY_START: Final = re.compile(rf"{_NAME}\+?=\Z")
_ASSIGNMENT: Final = re.compile(rf"{_NAME}(\[[^]]*\])?\+?=")
_OPERATOR: Final = re.compile(r"&&|\|\||;;&|;;|;&|\|&|&>>|&>|<<<|<<-|<<|>>|>\||<&|>&|<>|[;&|()<>]")
_REDIRECTION: Final = re.compile(r"[<>]|&>")
_BLANKS: Final = re.compile(r"(?:[ \t\r\v\f]|\\\n)+")
_PLAIN: Final = re.compile(r"[^\s;&|<>()'\"\\`$]+")
_QUOTING: Final = "'\"\\$`"
_PROCESS_SUBSTITUTION: Final = re.compile(r"[<>]\(")
_ESCAPED: Final = re.compile(r'\\([\\$"`\n])')
_EXPANSION: Final = re.compile(rf"`|\$(?:[({{]|{_NAME}|[0-9@*#?$!_-])")
# A home directory, names of files, or braces that stand for several words.
_PATTERN: Final = re.compile(r"^~|[=:]~|[*?]|.\[.*\]|^\[.+\]|\{[^}]*(?:,|\.\.)[^}]*\}")
_OPENING: Final = {
    "if": "fi",
    "for": "done",
    "while": "done",
    "until": "done",
    "select": "done",
    "case": "esac",
    "{": "}",
}
_CLOSING: Final = frozenset(_OPENING.values())
# What follows one of these words is a command.
_BEFORE_A_COMMAND: Final = frozenset({"if", "while", "until", "then", "do", "else", "elif", "{", "!", "time"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a command.

    Args:
        written: the word with its quotes.
        text: the word without its quotes; ``$`` and backquotes are left as they are.
        expands: whether the shell would put something else in its place: a variable, the output of a command, the
            names of files, a home directory.
    """

    written: str
    text: str
    expands: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A simple command: assignments, a program with its arguments, redirections.

    Args:
        line: the number of its first line, from 1.
        assignments: the words NAME=VALUE in front of the program.
        words: the program and its arguments; ``for NAME in ...`` and ``case WORD in`` stay one command.
        redirections: the redirections, as they are written.
        end: the operator behind it: ``;``, ``&``, ``|``, ``|&``, ``&&``, ``||``; empty at the end of a line.
    """

    line: int
    assignments: tuple[Word, ...]
    words: tuple[Word, ...]
    redirections: tuple[str, ...]
    end: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The words without their quotes."""
        return tuple(word.text for word in self.words)

    @property
    def is_piped(self) -> bool:
        """Whether its output goes to the next command."""
        return self.end in {"|", "|&"}

    @property
    def text(self) -> str:
        """The command in one line, without here-documents."""
        return " ".join([*(word.written for word in (*self.assignments, *self.words)), *self.redirections])


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A part of the script that stands alone: a command, a pipeline, a list with ``&&``, or a compound command.

    Args:
        line: the number of its first line, from 1.
        last_line: the number of its last line, here-documents included.
        text: the text, as it was written, with its here-documents.
        commands: the simple commands in it, in their order, also those inside a compound command.
        compound: the word that opens it, if it is a compound command: ``for``, ``while``, ``until``, ``select``,
            ``if``, ``case``, ``{``, ``(`` or ``function``; None for a command, a pipeline or a list.
        problem: why the rest of the script cannot be read; None if it can.
    """

    line: int
    last_line: int
    text: str
    commands: tuple[Command, ...]
    compound: str | None = None
    problem: str | None = None

    @property
    def command(self) -> Command | None:
        """Its only command; None for a pipeline, a list, a command in the background or a compound command."""
        alone = len(self.commands) == 1 and self.compound is None and self.commands[0].end in {"", ";"}
        return self.commands[0] if alone and self.problem is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment:
    """A comment, from its ``#`` on.

    Args:
        line: the number of its line, from 1.
        column: the number of characters in front of it.
    """

    line: int
    column: int
    text: str


class UnreadableTextError(Exception):
    """A quote, a parenthesis or a here-document does not end.

    Attributes:
        position: where it begins.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def read_word(text: str, start: int) -> tuple[Word, int]:
    """Return the word that starts at a position, and the position behind it.

    Raises:
        UnreadableTextError: a quote or a parenthesis in it does not close.
    """
    value = ""
    # The word with an "x" for everything that is quoted or expanded, without arrays and process substitutions.
    unquoted = ""
    expands = False
    position = start
    while position < len(text):
        if text[position] in _QUOTING:
            part = _read_quoted(text, position)
            unquoted += "x"
        elif _PROCESS_SUBSTITUTION.match(text, position) or (text[position] == "(" and _ARRAY_START.search(unquoted)):
            end = _end_of_group(text, text.index("(", position), "(", ")")
            part = _WordPart(end=end, value=text[position:end], expands=True)
        elif (plain := _PLAIN.match(text, position)) is not None:
            part = _WordPart(end=plain.end(), value=plain[0])
            unquoted += plain[0]
        else:
            break
        value += part.value
        expands = expands or part.expands
        position = part.end
    expands = expands or _PATTERN.search(unquoted) is not None
    return Word(written=text[start:position], text=value, expands=expands), position


class _WordPart(NamedTuple):
    """A part of a word.

    Args:
        end: the position behind it.
        value: what it means, without its quotes.
        expands: whether the shell expands something in it.
    """

    end: int
    value: str
    expands: bool = False


def _read_quoted(text: str, start: int) -> _WordPart:
    r"""Return the part of a word that begins with ``'``, ``"``, ``\``, ``$`` or a backquote.

    Raises:
        UnreadableTextError: a quote or a parenthesis in it does not close.
    """
    opening = text[start]
    if opening == "'":
        end = _find(text, "'", start)
        return _WordPart(end=end, value=text[start + 1 : end - 1])
    if opening == '"':
        end = _end_of_double_quotes(text, start)
        inner = text[start + 1 : end - 1]
        without_escapes = re.sub(r"\\.", "", inner, flags=re.DOTALL)
        expands = _EXPANSION.search(without_escapes) is not None
        return _WordPart(end=end, value=_ESCAPED.sub(_without_backslash, inner), expands=expands)
    if opening == "\\":
        end = start + 2
        return _WordPart(end=end, value=text[start + 1 : end].strip("\n"))
    end = _end_of_expansion(text, start)
    is_lone_dollar = end == start + 1
    return _WordPart(end=end, value=text[start:end], expands=not is_lone_dollar)


def _without_backslash(escape: re.Match[str]) -> str:
    return "" if escape[1] == "\n" else escape[1]


def _find(text: str, closing: str, start: int) -> int:
    """Return the position behind the next ``closing`` after the character at ``start``."""
    position = text.find(closing, start + 1)
    if position < 0:
        raise UnreadableTextError(f"a {closing} does not close", start)
    return position + 1


def _end_of_double_quotes(text: str, start: int) -> int:
    position = start + 1
    while position < len(text):
        character = text[position]
        if character == '"':
            return position + 1
        if character == "\\":
            position += 2
        elif character in "$`":
            position = _end_of_expansion(text, position)
        else:
            position += 1
    raise UnreadableTextError('a " does not close', start)


def _end_of_expansion(text: str, start: int) -> int:
    """Return the position behind ``$(...)``, ``${...}``, ``$NAME``, a lone ``$`` or a pair of backquotes."""
    if text[start] == "`":
        position = start + 1
        while position < len(text) and text[position] != "`":
            position += 2 if text[position] == "\\" else 1
        if position >= len(text):
            raise UnreadableTextError("a ` does not close", start)
        return position + 1
    following = text[start + 1 : start + 2]
    if following == "(":
        return _end_of_group(text, start + 1, "(", ")")
    if following == "{":
        return _end_of_group(text, start + 1, "{", "}")
    name = _EXPANSION.match(text, start)
    return start + 1 if name is None else name.end()


def _end_of_group(text: str, start: int, opening: str, closing: str) -> int:
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "'" and opening == "(":
            position = _find(text, "'", position)
            continue
        if character == '"':
            position = _end_of_double_quotes(text, position)
            continue
        if character == "\\":
            position += 2
            continue
        depth += (character == opening) - (character == closing)
        position += 1
        if depth == 0:
            return position
    raise UnreadableTextError(f"a {opening} does not close", start)


@dataclass(slots=True)
class _OpenCommand:
    """The words of a command that is being read."""

    start: int
    end: int
    assignments: list[Word] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirections: list[str] = field(default_factory=list)


class _Reader:
    """Reads the shell lines of a script; ``statements`` and ``comments`` hold what was read.

    Args:
        text: the whole script, with line breaks of Unix.
    """

    def __init__(self, text: str) -> None:
        self.statements: list[Statement] = []
        self.comments: list[Comment] = []
        self._text = text
        self._line_breaks = [match.start() for match in re.finditer("\n", text)]
        self._position = 0
        self._command: _OpenCommand | None = None
        self._commands: list[Command] = []
        self._statement_start: int | None = None
        self._compound: str | None = None
        # The words that open the compound commands that are open, each with the word that closes it.
        self._open: list[tuple[str, str]] = []
        # The delimiters of the here-documents that begin behind this line, and whether tabs in front do not count.
        self._here_documents: list[tuple[str, bool]] = []
        # Where the last token of the statement ends; a comment is no token.
        self._token_end = 0
        # How many commands were read in front of the pattern of "case" that is being read.
        self._commands_before_pattern = 0
        self._continues = False
        self._awaits_body = False

    def read(self) -> None:
        """Read the whole script."""
        try:
            while self._position < len(self._text):
                self._read_token()
            self._continues = False
            self._awaits_body = False
            self._end_line()
        except UnreadableTextError as error:
            self._give_up(str(error), error.position)
            return
        if self._open:
            self._give_up(f"a {self._open[-1][0]} does not close", self._statement_start or 0)

    def _give_up(self, problem: str, position: int) -> None:
        start = position if self._statement_start is None else self._statement_start
        self.statements.append(
            Statement(
                line=self._line_of(start),
                last_line=self._line_of(len(self._text)),
                text=self._text[start:].rstrip(),
                commands=tuple(self._commands),
                compound=self._compound,
                problem=f"{problem} (line {self._line_of(position)})",
            )
        )

    def _line_of(self, position: int) -> int:
        return bisect_left(self._line_breaks, position) + 1

    def _read_token(self) -> None:
        text = self._text
        position = self._position
        if (blanks := _BLANKS.match(text, position)) is not None:
            self._position = blanks.end()
        elif text[position] == "\n":
            self._position += 1
            self._end_line()
        elif text[position] == "#":
            end = text.find("\n", position)
            self._position = len(text) if end < 0 else end
            column = position - (text.rfind("\n", 0, position) + 1)
            self.comments.append(
                Comment(line=self._line_of(position), column=column, text=text[position : self._position])
            )
        elif _PROCESS_SUBSTITUTION.match(text, position) is None and (operator := _OPERATOR.match(text, position)):
            self._read_operator(operator[0])
        else:
            self._read_word()

    def _end_line(self) -> None:
        here_documents = self._here_documents
        self._here_documents = []
        for delimiter, strips_tabs in here_documents:
            self._skip_here_document(delimiter, strips_tabs=strips_tabs)
        if self._continues or self._awaits_body:
            return
        if here_documents:
            self._token_end = self._position
        self._end_command("")
        if not self._open:
            self._finish_statement()

    def _skip_here_document(self, delimiter: str, *, strips_tabs: bool) -> None:
        start = self._position - 1
        while self._position < len(self._text):
            end = self._text.find("\n", self._position)
            end = len(self._text) if end < 0 else end
            line = self._text[self._position : end]
            self._position = min(end + 1, len(self._text))
            if (line.lstrip("\t") if strips_tabs else line) == delimiter:
                return
        raise UnreadableTextError(f"a here-document does not end with {delimiter}", start)

    def _read_operator(self, operator: str) -> None:
        start = self._position
        self._start_statement(start)
        self._position += len(operator)
        if _REDIRECTION.match(operator):
            self._read_redirection(operator, start)
        elif operator == "(":
            self._open_parenthesis()
        elif operator == ")":
            self._close_parenthesis(start)
        else:
            self._end_command(operator)
            self._continues = operator in {"&&", "||", "|", "|&"}
            if operator in {";;", ";&", ";;&"}:
                self._commands_before_pattern = len(self._commands)
            if not self._open and not self._continues:
                self._token_end = start if operator == ";" else self._position
                self._finish_statement()
        self._token_end = self._position

    def _read_redirection(self, operator: str, start: int) -> None:
        command = self._open_command(start)
        number = ""
        if command.words and command.words[-1].written.isdigit() and command.end == start:
            number = command.words.pop().written
        blanks = _BLANKS.match(self._text, self._position)
        target, self._position = read_word(self._text, self._position if blanks is None else blanks.end())
        command.redirections.append(f"{number}{self._text[start : self._position]}")
        command.end = self._position
        if operator in {"<<", "<<-"}:
            self._here_documents.append((target.text, operator == "<<-"))

    def _open_parenthesis(self) -> None:
        command = self._command
        is_empty = self._text[self._position :].lstrip()[:1] == ")"
        if is_empty and (self._awaits_body or (command is not None and len(command.words) == 1)):
            # Behind the name of a function; its body follows, perhaps in the next line.
            self._position = self._text.index(")", self._position) + 1
            self._command = None
            self._compound = self._compound or "function"
            self._awaits_body = True
            return
        if self._open and self._open[-1][0] == "case" and (command is None or not command.words):
            # In front of a pattern.
            return
        self._end_command("")
        self._open_compound("(", ")")

    def _close_parenthesis(self, start: int) -> None:
        if self._open and self._open[-1][0] == "(":
            self._end_command("")
            self._open.pop()
        elif self._open and self._open[-1][0] == "case":
            # The pattern in front of it is no command.
            self._command = None
            del self._commands[self._commands_before_pattern :]
        else:
            raise UnreadableTextError("a ) was not opened", start)

    def _open_compound(self, opening: str, closing: str) -> None:
        if not self._open and not self._commands:
            self._compound = self._compound or opening
        self._open.append((opening, closing))
        self._continues = False
        self._awaits_body = False

    def _read_word(self) -> None:
        start = self._position
        self._start_statement(start)
        self._continues = False
        word, self._position = read_word(self._text, start)
        if self._position == start:
            # A character that begins no word, such as a control character.
            self._position += 1
            word = Word(written=self._text[start], text=self._text[start], expands=False)
        self._token_end = self._position
        if self._command is None and self._is_keyword(word):
            return
        command = self._open_command(start)
        command.end = self._position
        if not command.words and _ASSIGNMENT.match(word.written):
            command.assignments.append(word)
        else:
            command.words.append(word)
        if word.written == "in" and command.words[0].written == "case":
            self._end_command("")
            self._commands_before_pattern = len(self._commands)

    def _is_keyword(self, word: Word) -> bool:
        """Follow a word that opens, continues or closes a compound command; return whether no more is to do for it."""
        written = word.written
        if self._open and written == self._open[-1][1] and written in _CLOSING:
            self._open.pop()
            return True
        if written == "function":
            self._compound = self._compound or "function"
            self._awaits_body = True
            return True
        if self._awaits_body and written != "{":
            # The name behind the word "function".
            return True
        if written in _OPENING:
            self._open_compound(written, _OPENING[written])
        return written in _BEFORE_A_COMMAND

    def _start_statement(self, start: int) -> None:
        if self._statement_start is None:
            self._statement_start = start

    def _open_command(self, start: int) -> _OpenCommand:
        if self._command is None:
            self._command = _OpenCommand(start=start, end=start)
        return self._command

    def _end_command(self, operator: str) -> None:
        command = self._command
        self._command = None
        if command is None or not (command.assignments or command.words):
            return
        self._commands.append(
            Command(
                line=self._line_of(command.start),
                assignments=tuple(command.assignments),
                words=tuple(command.words),
                redirections=tuple(command.redirections),
                end=operator,
            )
        )

    def _finish_statement(self) -> None:
        start = self._statement_start
        if start is None:
            return
        text = self._text[start : self._token_end].rstrip()
        if text:
            statement = Statement(
                line=self._line_of(start),
                last_line=self._line_of(start + len(text)),
                text=text,
                commands=tuple(self._commands),
                compound=self._compound,
            )
            self.statements.append(statement)
        self._statement_start = None
        self._commands = []
        self._compound = None


def read_shell(text: str) -> tuple[tuple[Statement, ...], tuple[Comment, ...]]:
    """Return the statements and the comments of a script; nothing of it is executed.

    A script that cannot be read to its end has a last statement with a problem, which holds the rest of its text.

    Args:
        text: the whole script, with line breaks of Unix.
    """
    reader = _Reader(text)
    reader.read()
    return tuple(reader.statements), tuple(reader.comments)
