"""Writes clients/python/postdate/sync from the asyncio classes beside it: the same names, signatures and docstrings.

python tools/generate_sync.py            # after any change of the SDK's public methods
python tools/generate_sync.py --check    # exit status 1 if that was forgotten

Each public class becomes one that holds the asyncio one and runs its coroutines on the portal's loop.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path
from textwrap import fill, indent

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "clients/python/postdate"
TARGET = SOURCE / "sync"
CLASSES = {
    "Topics": "admin",
    "Subscriptions": "admin",
    "Backups": "backups",
    "Client": "client",
    "DeadLetters": "dead_letters",
    "Message": "message",
    "PartitionedProducer": "partitions",
    "PartitionedSubscription": "partitions",
    "Producer": "producer",
    "Received": "pull",
    "Recurring": "recurring",
    "Schedule": "schedule",
    "Subscription": "subscription",
}
DOC_WIDTH = 108
used: set[str] = set()
"""The patterns of WORDS that were met; one that no longer is would let asyncio's words through."""
# What these classes offer to each other, and to nobody else, is listed in these protocols.
INTERNAL = {"message": "Holder", "_link": "Peer", "_runner": "Source"}
HIDDEN = {
    "Producer": {"prepare", "submit"},
    "Subscription": {"address", "kept"},
}
"""Others that are for the package's own use."""
IMPORTS = {
    "contextmanager": "contextlib",
    "nullcontext": "contextlib",
    "Callable": "collections.abc",
    "Generator": "collections.abc",
    "Iterator": "collections.abc",
}

BLOCK_ENDS = {"open": "enter", "close": "leave"}
"""Methods that stand in place of the two ends of a `with` block, and what runs those."""

PROCESSING = """
@contextmanager
def processing(self) -> Generator[Message, None, None]:
    {docstring}
    tracing = _message.tracing
    with (
        nullcontext() if tracing is None else tracing.processing(self._inner),
        self._portal.entered(_message.Processing(self._inner, None)),
    ):
        yield self
"""
RUN = """
def run(self, handler: Callable[[Message], object], {rest}) -> None:
    {docstring}
    self._portal.run_handlers(
        lambda handle: self._inner.run(handle, {passed}),
        lambda message: handler(Message(message, self._portal)),
        concurrency,
    )
"""
WORDS = [
    (r"an async context manager", "a context manager"),
    (r"of the block awaits the confirmation", "of the block waits for the confirmation"),
    (r"several tasks may do so at once", "several threads may do so at once"),
    (r"in one task\.", "in one thread."),
    (r"to have many acks share one, process in several tasks", "to have many acks share one, use `run`"),
    (r"cancelled, it raises `CancelledError`", "interrupted by Ctrl-C, it raises `KeyboardInterrupt`"),
    (r"and a cancellation stop it", "and Ctrl-C stop it"),
    (r"and are cancelled then", "and are waited for no longer then"),
    (r"A second cancellation cancels the handlers at once\.", "A second Ctrl-C does not wait for them."),
    (r"Call `handler` for each message", "Call `handler` in a thread for each message"),
]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, text in generate().items():
        path = TARGET / name
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if stale and check:
        print(f"Not up to date, run tools/generate_sync.py: {', '.join(stale)}", file=sys.stderr)
        return 1
    return 0


def generate() -> dict[str, str]:
    """The text of each module."""
    modules = {f"{name}.py": module(name) for name in sorted(set(CLASSES.values()))}
    modules["__init__.py"] = package()
    unused = [pattern for pattern, _ in WORDS if pattern not in used]
    if unused:
        sys.exit(f"WORDS that are in no docstring any more: {unused}")
    return {name: formatted(text, name) for name, text in modules.items()}


def formatted(text: str, name: str) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    path = str(TARGET / name)
    for command in (
        ["check", "--quiet", "--fix-only", "--select=I,F401", f"--stdin-filename={path}", "-"],
        ["format", "--quiet", f"--stdin-filename={path}", "-"],
    ):
        done = subprocess.run(
            [*ruff, *command], input=text, capture_output=True, text=True, check=True, cwd=ROOT
        )
        text = done.stdout
    return text


def package() -> str:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    lines = [
        '"""Postdate without async: the names of `postdate`, with calls that block.\n\n'
        'with postdate.sync.connect("localhost:7650") as client:\n'
        '    with client.producer("orders") as producer:\n'
        '        producer.send(b"...", deliver_after=timedelta(minutes=15))\n'
        '    with client.subscribe("orders", "billing") as subscription:\n'
        "        for message in subscription:\n"
        "            with message.processing():\n"
        "                ...\n\n"
        "Any thread may use a client and all that is made from it. Open clients do not survive a fork: connect\n"
        "in the children, as each worker of gunicorn or Celery does by its hook.\n\n"
        'Made by tools/generate_sync.py, as the modules beside it.\n"""\n'
    ]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name.startswith("_"):
                    continue
                is_sync = alias.name in CLASSES or alias.name == "connect"
                where = (node.module or "").replace("postdate.", "postdate.sync.") if is_sync else node.module
                lines.append(f"from {where} import {alias.name}")
        elif isinstance(node, ast.Assign):
            lines.append(ast.unparse(node))
    return "\n".join(lines)


def module(name: str) -> str:
    tree = ast.parse((SOURCE / f"{name}.py").read_text())
    places = imported(tree, name)
    parts = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and CLASSES.get(node.name) == name:
            parts.append(sync_class(node))
        elif isinstance(node, ast.FunctionDef) and node.name == "connect":
            parts.append(sync_connect(node))
    body = "\n\n".join(parts)
    lines = [
        f'"""`postdate.{name}` without async. Made by tools/generate_sync.py."""\n',
        "from __future__ import annotations\n",
        *(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import)),
        f"from postdate import {name} as _{name}",
        "from postdate.sync._portal import Portal, portal",
        *(f"from {where} import {what}" for what, where in IMPORTS.items()),
        *(f"from postdate.sync.{where} import {what}" for what, where in CLASSES.items() if where != name),
        *(
            f"from {where} import {what}"
            for what, where in places.items()
            if what not in CLASSES and what not in IMPORTS
        ),
    ]
    return "\n".join([*lines, "\n", body, ""])


def imported(tree: ast.Module, name: str) -> dict[str, str]:
    """Return the imports of names that annotations may use."""
    places = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            places.update({alias.name: node.module or "" for alias in node.names})
        elif isinstance(node, ast.ClassDef):
            places[node.name] = f"postdate.{name}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            places[node.targets[0].id] = f"postdate.{name}"
    return {what: where for what, where in places.items() if not what.startswith("_")}


def internal() -> set[str]:
    names = set()
    for name, protocol in INTERNAL.items():
        for node in ast.parse((SOURCE / f"{name}.py").read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == protocol:
                names |= {
                    each.name
                    for each in node.body
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                }
    return names


def sync_connect(node: ast.FunctionDef) -> str:
    call = f"_client.connect({passed(node.args)})"
    return f"def connect({signature(node.args)}) -> Client:\n{doc(node)}    return Client({call}, portal())\n"


def sync_class(node: ast.ClassDef) -> str:
    where = f"_{CLASSES[node.name]}.{node.name}"
    lines = [
        f"class {node.name}:",
        doc(node),
        f"    def __init__(self, inner: {where}, portal: Portal) -> None:",
        "        self._inner = inner",
        "        self._portal = portal",
        "",
    ]
    hidden = HIDDEN.get(node.name, set())
    if node.name != "Message":  # a message is what holders are told of
        hidden = hidden | internal()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            lines.append(indent(attribute(each.target.id, each.annotation), "    "))
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            if each.name == "__init__":
                lines += [indent(attribute(*found), "    ") for found in public_attributes(each)]
            elif each.name not in hidden and (text := method(node.name, each)):
                lines.append(indent(text, "    "))
    return "\n".join(lines)


def public_attributes(init: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[str, ast.expr]]:
    """Those that `__init__` sets to what it was passed under the same name."""
    annotations = {arg.arg: arg.annotation for arg in (*init.args.args, *init.args.kwonlyargs)}
    found = []
    for statement in init.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            name = statement.targets[0].attr
            annotation = annotations.get(name)
            if annotation is not None and not name.startswith("_"):
                found.append((name, annotation))
    return found


def attribute(name: str, annotation: ast.expr) -> str:
    kind = annotated(annotation)
    return f"@property\ndef {name}(self) -> {kind}:\n    return {wrapped(f'self._inner.{name}', kind)}\n"


def method(class_name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    args = node.args
    kind = annotated(node.returns) if node.returns else "None"
    call = f"self._inner.{node.name}({passed(args)})"
    if node.name.startswith("_"):
        return special_method(class_name, node.name, args, kind, call)
    return public_method(class_name, node, kind, call)


def special_method(class_name: str, name: str, args: ast.arguments, kind: str, call: str) -> str:
    if name == "__aenter__":
        return f"def __enter__(self) -> {kind}:\n    self._portal.enter({call})\n    return self\n"
    if name == "__aexit__":
        return f"def __exit__({signature(args)}) -> {kind}:\n    self._portal.leave({call})\n"
    if name == "__aiter__":
        return f"def __iter__(self) -> {class_name}:\n    return self\n"
    if name == "__anext__":
        return (
            f"def __next__(self) -> {kind}:\n    return {wrapped('self._portal.next(self._inner)', kind)}\n"
        )
    if name == "__iter__":
        return f"def __iter__(self) -> {kind}:\n    return iter(self.messages)\n"
    if name in {"__len__", "__repr__"}:
        return f"def {name}(self) -> {kind}:\n    return {name.strip('_')}(self._inner)\n"
    return ""


def public_method(class_name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str, call: str) -> str:
    name, args, text = node.name, node.args, doc(node)
    if name == "processing":
        return PROCESSING.format(docstring=text.strip())
    if name == "run":
        _, rest = signature(args).split("*", 1)
        _, names = passed(args).split(", ", 1)
        return RUN.format(docstring=text.strip(), rest=f"*{rest}", passed=names)
    if "property" in map(ast.unparse, node.decorator_list):
        return f"@property\ndef {name}(self) -> {kind}:\n{text}    return {wrapped(f'self._inner.{name}', kind)}\n"
    if kind.startswith("AsyncIterator["):
        kind = kind.removeprefix("Async")
        body = f"self._portal.iterate({call})"
    elif name in BLOCK_ENDS:
        body = f"self._portal.{BLOCK_ENDS[name]}({call})"
    elif isinstance(node, ast.AsyncFunctionDef):
        body = wrapped(f"self._portal.run({call})", kind)
    elif class_name == "Client":
        body = wrapped(call, kind)  # makes something, and needs no loop for it
    else:
        body = f"self._portal.call(self._inner.{name}{', ' if passed(args) else ''}{passed(args)})"
    returns = "" if kind == "None" else "return "
    return f"def {name}({signature(args)}) -> {kind}:\n{text}    {returns}{body}\n"


def annotated(annotation: ast.expr) -> str:
    return re.sub(r"\bpull\.Received\b", "Received", ast.unparse(annotation))


def wrapped(value: str, kind: str) -> str:
    """An expression that turns an asyncio result into the one without async."""
    if kind in CLASSES:
        return f"{kind}({value}, self._portal)"
    if kind == "list[Message]":
        return f"[Message(each, self._portal) for each in {value}]"
    if kind == "tuple[Message, ...]":
        return f"tuple(Message(each, self._portal) for each in {value})"
    return value


def signature(args: ast.arguments) -> str:
    return re.sub(r"\bpull\.", "", ast.unparse(args))


def passed(args: ast.arguments) -> str:
    """The arguments of a call that passes all that came."""

    def value(arg: ast.arg) -> str:
        kind = ast.unparse(arg.annotation) if arg.annotation else ""
        if kind == "Message":
            return f"{arg.arg}._inner"
        if kind == "Iterable[Message]":
            return f"[each._inner for each in {arg.arg}]"
        return arg.arg

    given = [value(arg) for arg in (*args.posonlyargs, *args.args) if arg.arg != "self"]
    if args.vararg:
        given.append(f"*{args.vararg.arg}")
    given += [f"{arg.arg}={value(arg)}" for arg in args.kwonlyargs]
    if args.kwarg:
        given.append(f"**{args.kwarg.arg}")
    return ", ".join(given)


def doc(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    text = ast.get_docstring(node)
    if text is None:
        return ""
    text = text.split("\n\nInvariants:")[0]
    for pattern, words in WORDS:
        text, count = re.subn(pattern.replace(" ", r"\s+"), words, text)
        if count:
            used.add(pattern)
    if max(map(len, text.splitlines())) > DOC_WIDTH:
        text = "\n\n".join(fill(paragraph, DOC_WIDTH) for paragraph in text.split("\n\n"))
    quoted = f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'
    return indent(quoted, "    ") + "\n"


if __name__ == "__main__":
    sys.exit(main())
