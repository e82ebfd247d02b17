"""What the django-pglocks on PYTHONPATH sends for each name on standard input."""

import re
import sys

import django.db
from django.conf import settings

settings.configure()


class Cursor:
    """Notes the statements instead of sending them."""

    def __init__(self, sent):
        self.sent = sent

    def execute(self, sql, params=None):
        self.sent.append((sql, params))

    def fetchone(self):
        return (True,)

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Connection:
    def __init__(self):
        self.sent = []

    def cursor(self):
        return Cursor(self.sent)


# Both generations import it only when a lock is taken.
connection = Connection()
django.db.connections = {"default": connection}

from django_pglocks import advisory_lock  # noqa: E402


def decode(written):
    kind, unit, *count = written.split(":")
    return bytes.fromhex(unit).decode() * (int(count[0]) if kind == "repeat" else 1)


def key(sql, params, function):
    """The one number of a statement, wherever the package put it."""
    if params is None:
        return int(re.fullmatch(rf"SELECT {function}\((-?\d+)\)", sql)[1])
    assert sql.rstrip() == f"SELECT {function}(%s)", sql
    (number,) = params
    return number


for line in sys.stdin:
    name = decode(line.rstrip("\n"))
    connection.sent.clear()
    with advisory_lock(name) as acquired:
        assert acquired
    lock, unlock = connection.sent
    number = key(*lock, "pg_advisory_lock")
    assert number == key(*unlock, "pg_advisory_unlock")
    if name == "223 345":
        for sql, params in (lock, unlock):
            print("#", sql.rstrip() if params is None else f"{sql.rstrip()} with {params}")
    print(number)
