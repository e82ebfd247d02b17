"""Provokes the alerts of docs/metrics, and asks a Prometheus for what docs/metrics has.

Called by scripts/check metrics.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

program, directory = sys.argv[1:]
# Each wait ends after this time at the latest.
PATIENCE = 90


def ask(path, **parameters):
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        # It has not read its own files yet.
        if error.code == 503:
            return None
        sys.exit(f"{parameters}: {error.read().decode()}")
    except urllib.error.URLError:
        return None


def wait_for(what, found):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if result := found():
            return result
        time.sleep(0.2)
    sys.exit(f"not within {PATIENCE} seconds: {what}")


def query(text):
    data = ask("query", query=text)
    return data and data["result"]


def firing(name):
    data = ask("alerts") or {"alerts": []}
    is_it = lambda it: it["labels"]["alertname"] == name and it["state"] == "firing"
    return [it for it in data["alerts"] if is_it(it)]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def read(name):
    with open(f"{directory}/{name}") as file:
        return file.read()


def quick(rules):
    """The rules with seconds for minutes, half a second for a long wait, and one for a late tick."""
    rules = rules.replace("[5m]", "[8s]").replace("offset 5m", "offset 8s")
    rules = re.sub(r"for: (\d)m", "for: 2s", rules)
    return rules.replace("> 10\n", "> 0.5\n").replace("> 60\n", "> 1\n")


def provoke_all(example):
    names = re.findall(r"(?m)^      - alert: (\w+)", read("alerts.yml"))
    for name in names:
        begin(example, name)
        alert = wait_for(f"{name} fires", lambda: firing(name))
        begin(example, "end")
        wait_for(f"{name} ends", lambda: not firing(name))
        print(f"fires and ends: {name}: {alert[0]['annotations']['summary']}", flush=True)


def begin(example, incident):
    example.stdin.write(incident + "\n")
    example.stdin.flush()
    if example.stdout.readline().strip() != incident:
        sys.exit(f"the example has not begun {incident}")


def run_queries():
    panels = json.loads(read("dashboard.json"))["panels"]
    queries = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    queries = [(title, text.replace("$__rate_interval", "30s")) for title, text in queries]
    with open(f"{directory}.md") as file:
        blocks = re.findall(r"```promql\n(.*?)```", file.read(), re.S)
    for block in blocks:
        for text in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n", "\n", block)):
            # Lines that are not indented are queries of their own.
            queries += [("metrics.md", one) for one in re.split(r"\n(?=\S)", text.strip()) if one]
    for title, text in queries:
        print(f"{len(query(text)):3} series  {title}: {' '.join(text.split())[:80]}")


def run_exporter_queries(url):
    text = read("postgres_exporter.yml")
    for name, block in re.findall(r"(?m)^(\w+):\n((?:  .*\n)+)", text):
        sql = " ".join(re.search(r"query: >-\n((?:    .*\n)+)", block)[1].split())
        columns = set(re.findall(r"(?m)^    - (\w+):", block))
        psql = ["psql", "-X", "--csv", "-c", sql, url]
        output = subprocess.run(psql, check=True, capture_output=True, text=True).stdout.splitlines()
        if set(output[0].split(",")) != columns:
            sys.exit(f"{name}: the query has {output[0]}, and the metrics are {columns}")
        print(f"{len(output) - 1:3} rows    {name}")


processes = []


def start(log, *arguments, **more):
    with open(log, "w") as file:
        process = subprocess.Popen(arguments, stderr=file, text=True, **more)
    processes.append(process)
    return process


with tempfile.TemporaryDirectory() as work:
    try:
        pipe = subprocess.PIPE
        example = start(f"{work}/example", program, stdin=pipe, stdout=pipe)
        # The application says first what it has migrated.
        lines = iter(example.stdout.readline, "")
        port = next((line.strip() for line in lines if line.strip().isdigit()), None)
        if port is None:
            sys.exit("the example has not started")
        url = next(lines).strip()
        exporter_port, prometheus_port = free_port(), free_port()
        mark = "&" if "?" in url else "?"
        start(
            f"{work}/exporter",
            "prometheus-postgres-exporter",
            f"--extend.query-path={directory}/postgres_exporter.yml",
            f"--web.listen-address=127.0.0.1:{exporter_port}",
            "--disable-default-metrics",
            "--disable-settings-metrics",
            env=os.environ | {"DATA_SOURCE_NAME": f"{url}{mark}sslmode=disable"},
        )
        with open(f"{work}/alerts.yml", "w") as file:
            file.write(quick(read("alerts.yml")))
        with open(f"{work}/prometheus.yml", "w") as file:
            file.write(
                "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
                f"rule_files: [{work}/alerts.yml]\n"
                "scrape_configs:\n"
                f'  - {{job_name: bookings, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}\n'
                f'  - {{job_name: db, static_configs: [{{targets: ["127.0.0.1:{exporter_port}"]}}]}}\n'
            )
        start(
            f"{work}/prometheus",
            "prometheus",
            f"--config.file={work}/prometheus.yml",
            f"--storage.tsdb.path={work}/data",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        )
        prometheus = f"http://127.0.0.1:{prometheus_port}"
        # Both are scraped: the example has series, and the exporter has those of the database.
        wait_for("numbers of the example", lambda: query("rate(interlock_operations_total[30s]) > 0"))
        wait_for("the exporter", lambda: query('up{job="db"} == 1'))
        provoke_all(example)
        run_queries()
        run_exporter_queries(url)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
