"""Locks one name the way a Python program does, on command.

    client.py DATABASE_URL fnv|crc32|django_pglocks_2|django_pglock NAME

Reads commands from standard input, one per line: `try` prints `granted` or `busy`, `unlock`
prints `unlocked` or `not held`. Ends with the input.
"""

import sys
import zlib

import fnv
import psycopg2


def fnv_1a(name):
    number = fnv.hash(name.encode(), algorithm=fnv.fnv_1a, bits=64)
    # PostgreSQL's bigint is signed.
    return number - 2**64 if number >= 2**63 else number


def crc32(name):
    return zlib.crc32(name.encode())


def django_pglocks_2(name):
    from django_pg_utils.locks._lock import resolve_lock_id

    return resolve_lock_id(name)


def django_pglock(name):
    from django.conf import settings

    settings.configure()
    import pglock

    return pglock.advisory(name).int_lock_id


HASHES = {
    "fnv": fnv_1a,
    "crc32": crc32,
    "django_pglocks_2": django_pglocks_2,
    "django_pglock": django_pglock,
}


def main(url, mode, name):
    key = HASHES[mode](name)
    connection = psycopg2.connect(url)
    connection.autocommit = True
    cursor = connection.cursor()

    def ask(function):
        cursor.execute(f"SELECT {function}(%s)", (key,))
        return cursor.fetchone()[0]

    for line in sys.stdin:
        match line.strip():
            case "try":
                reply = "granted" if ask("pg_try_advisory_lock") else "busy"
            case "unlock":
                reply = "unlocked" if ask("pg_advisory_unlock") else "not held"
            case command:
                sys.exit(f"no such command: {command}")
        print(reply, flush=True)


main(*sys.argv[1:])
