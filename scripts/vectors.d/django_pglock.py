"""The key that the django-pglock on PYTHONPATH takes for each name on standard input."""

import sys

from django.conf import settings

settings.configure()

import pglock  # noqa: E402


def decode(written):
    kind, unit, *count = written.split(":")
    return bytes.fromhex(unit).decode() * (int(count[0]) if kind == "repeat" else 1)


for line in sys.stdin:
    name = decode(line.rstrip("\n"))
    key = pglock.advisory(name).int_lock_id
    # As pg_locks shows it.
    assert pglock.advisory_id(name) == (key >> 32, key & 0xFFFFFFFF)
    print(key)
