"""Counts test results for tests/run. Prints three numbers: passed, failed and skipped.

  results.py bazel EVENTS   a Bazel build event file (--build_event_json_file): the cases inside
                            each C++ test; a test that did not build or end properly is one failure
  results.py junit FILE     a pytest --junitxml file

A test that was skipped because a program is "not built" counts as failed: tests/run builds all.
"""

import json
import os
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


def is_not_built(case):
    skipped = case.find("skipped")
    return skipped is not None and "not built" in (skipped.get("message") or "")


def count_cases(path):
    """Cases of a JUnit file as [passed, failed, skipped]."""
    counts = [0, 0, 0]
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts[1] += 1
        elif is_not_built(case):
            print(f"not built: {case.get('classname')}.{case.get('name')}", file=sys.stderr)
            counts[1] += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            counts[2] += 1
        else:
            counts[0] += 1
    return counts


def local_path(uri):
    return urllib.parse.unquote(urllib.parse.urlparse(uri).path)


def count_test_run(result):
    """Cases of one finished run of one Bazel test."""
    counts = [0, 0, 0]
    for output in result.get("testActionOutput", []):
        if output["name"] == "test.xml" and os.path.exists(local_path(output["uri"])):
            counts = count_cases(local_path(output["uri"]))
    if result["status"] not in ("PASSED", "FLAKY") and counts[1] == 0:
        counts[1] = 1  # killed, timed out, or failed outside of a case
    return counts


def count_bazel(path):
    expected, runs = set(), {}
    finished_well = False
    with open(path, encoding="utf-8") as events:
        for line in events:
            event = json.loads(line)
            kind = event["id"]
            if "targetConfigured" in kind and "testSize" in event.get("configured", {}):
                expected.add(kind["targetConfigured"]["label"])
            elif "testResult" in kind and "testResult" in event:
                runs[kind["testResult"]["label"]] = event["testResult"]
            elif "finished" in event:
                finished_well = event["finished"].get("overallSuccess", False)
    total = [0, 0, 0]
    for label in sorted(expected | set(runs)):
        counts = count_test_run(runs[label]) if label in runs else [0, 1, 0]
        if counts[1]:
            print(f"failed: {label}", file=sys.stderr)
        total = [sum(pair) for pair in zip(total, counts)]
    if not finished_well and total[1] == 0:
        total[1] = 1
    return total


def main():
    count = {"bazel": count_bazel, "junit": count_cases}[sys.argv[1]]
    print(*count(sys.argv[2]))


if __name__ == "__main__":
    main()
