#!/usr/bin/python3
"""Checks the documentation against the tree; one line, PASS or FAIL, for each rule.

Every relative link of README.md and docs/ resolves, headings included; every page that a comment or
text names exists and can be found; every key of the daemon's configuration, every metric family and
every field of the APIs is documented.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A field of a message or a call of a service in a .proto file.
FIELD = re.compile(r"\s+((optional |repeated )?(map<[^>]*>|[A-Za-z][\w.]*) [a-z]\w* = \d+;|rpc )")
SOURCES = (".cc", ".h", ".py", ".proto", ".bazel", ".bzl", ".md", ".sh")


def report(rule, places):
    for place in places[:20]:
        print("  " + place)
    print(("FAIL" if places else "PASS") + " style: " + rule)
    return not places


def read(path):
    return path.read_text(encoding="utf-8")


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def sources():
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if parts[0].startswith((".git", "bazel-", "build", "dist", "out")) or not path.is_file():
            continue
        if path.suffix in SOURCES or path.name == "run":
            yield path


def prose(text):
    """Without code blocks, in which brackets are code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return "\n".join("" if line.startswith("    ") else line for line in text.split("\n"))


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links():
    broken = []
    for page in pages():
        for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(read(page))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target} does not exist")
            elif anchor and anchor not in anchors(read(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
    return broken


def missing_pages():
    missing = []
    for path in sources():
        for name in set(re.findall(r"\bdocs/([a-z0-9_]+\.md)\b", read(path))):
            if not (ROOT / "docs" / name).exists():
                missing.append(f"{path.relative_to(ROOT)}: docs/{name}")
    return missing


def unlinked_pages():
    """Pages that no other page links to cannot be found."""
    linked = set()
    for page in pages():
        for target in re.findall(r"\]\(([^)#\s]+)", read(page)):
            linked.add((page.parent / target).resolve())
    return [str(p.relative_to(ROOT)) for p in pages()[1:] if p.resolve() not in linked]


def undocumented(names, page, what):
    text = read(ROOT / "docs" / page)
    return [f"docs/{page}: no {what} {name}" for name in sorted(names) if f"`{name}" not in text]


def config_keys():
    """Keys that the daemon reads from its YAML file, in whichever files of server/ it does so."""
    keys = set()
    for path in (ROOT / "server").glob("*_config*.cc"):
        keys.update(re.findall(r'yaml\.\w+\(\s*"(\w+)"', read(path)))
    return keys


def metric_families():
    return set(re.findall(r'"(zeroshard_\w+)"', read(ROOT / "server/job_metrics.cc")))


def uncommented_fields():
    """Fields, messages and calls in proto/ without a comment of their own."""
    places = []
    for path in sorted((ROOT / "proto").glob("*.proto")):
        lines = read(path).split("\n")
        for number, line in enumerate(lines):
            if FIELD.match(line) and not lines[number - 1].strip().startswith("//"):
                places.append(f"{path.relative_to(ROOT)}:{number + 1}: {line.strip()}")
    return places


def main():
    keys = undocumented(config_keys(), "operations.md", "key")
    metrics = undocumented(metric_families(), "metrics.md", "metric")
    results = [
        report("links in README.md and docs/ resolve", broken_links()),
        report("pages that the tree names exist", missing_pages()),
        report("every page is linked from another", unlinked_pages()),
        report("docs/operations.md has every configuration key", keys),
        report("docs/metrics.md has every metric", metrics),
        report("fields and calls of proto/ are commented", uncommented_fields()),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
