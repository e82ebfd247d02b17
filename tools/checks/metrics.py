"""Runs the queries of docs/metrics in Prometheus, and those of postgres_exporter in psql.

Called by scripts/check metrics.
"""

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request

prometheus, directory, database = sys.argv[1:]


def ask(path, **parameters):
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        sys.exit(f"{parameters}: {error.read().decode()}")
    except urllib.error.URLError:
        return None


def wait_for(what, found):
    for _ in range(300):
        if result := found():
            return result
        time.sleep(0.2)
    sys.exit(f"not within a minute: {what}")


def query(text):
    data = ask("query", query=text)
    return data and data["result"]


wait_for("metrics of the example", lambda: query("rate(interlock_operations_total[30s]) > 0"))
with open(f"{directory}/dashboard.json") as file:
    panels = json.load(file)["panels"]
queries = [(panel["title"], panel["targets"][0]["expr"]) for panel in panels]
queries = [(title, text.replace("$__rate_interval", "30s")) for title, text in queries]
with open(f"{directory}.md") as file:
    blocks = re.findall(r"```promql\n(.*?)```", file.read(), re.S)
for block in blocks:
    for text in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n", "\n", block)):
        # Lines that are not indented are queries of their own.
        queries += [("metrics.md", one) for one in re.split(r"\n(?=\S)", text.strip()) if one]
for title, text in queries:
    print(f"{len(query(text)):3} series  {title}: {' '.join(text.split())[:80]}")


def fires(name):
    return [it for it in ask("alerts")["alerts"] if it["labels"]["alertname"] == name]


# The example has lost a lock, for the first time.
alert = wait_for("InterlockLost fires", lambda: fires("InterlockLost"))
print("fires:", alert[0]["annotations"]["summary"])

with open(f"{directory}/postgres_exporter.yml") as file:
    text = file.read()
for name, block in re.findall(r"(?m)^(\w+):\n((?:  .*\n)+)", text):
    sql = " ".join(re.search(r"query: >-\n((?:    .*\n)+)", block)[1].split())
    columns = set(re.findall(r"(?m)^    - (\w+):", block))
    psql = ["psql", "-X", "--csv", "-c", sql, database]
    output = subprocess.run(psql, check=True, capture_output=True, text=True).stdout.splitlines()
    if set(output[0].split(",")) != columns:
        sys.exit(f"{name}: the query has {output[0]}, and the metrics are {columns}")
    print(f"{len(output) - 1:3} rows    {name}")
