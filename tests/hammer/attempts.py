"""Attempts a throttle by the stored functions.

    attempts.py DATABASE_URL CONNECTIONS KEYS

From the first line of the input to its end. Without keys, the resource itself; else the connections
share out the keys in their order, so that the processes meet at the first attempts, and from then
on take keys at random.
"""

import os
import random
import sys
import threading

from client import ask, connect, pause, say, until_the_input_ends

LOCK = "SELECT resource_control.lock_throttled_resource('hammered', '{}')"

# One message each, which PostgreSQL runs in one transaction.
PLAIN = LOCK.format("plain")
TWICE = f"""
    SELECT set_config('hammer.first', ({LOCK.format("first")})::text, false);
    SELECT current_setting('hammer.first') = 'true', ({LOCK.format("second")})
"""
# The clock decides, neither the start of the transaction nor that of the message.
SLEPT = f"""
    BEGIN ISOLATION LEVEL READ COMMITTED;
    SELECT pg_sleep(0.03);
    SELECT locked, granted, decided_at >= now() + interval '30 ms'
        FROM ({LOCK.format("slept")} AS locked) AS first,
            resource_control.attempt_throttled_resource('hammered', 'slept')
"""

BY_KEY = """
    SELECT granted FROM resource_control.attempt_throttled_key('hammered by key', %s, 'by the functions')
"""


def attempt_resource(connection):
    """How many grants were committed."""
    pause(4)
    match random.randrange(10):
        case 0:
            with connection.cursor() as cursor:
                cursor.execute(SLEPT)
                locked, granted, decided_by_the_clock = cursor.fetchone()
                cursor.execute("COMMIT")
            assert decided_by_the_clock
            return locked + granted
        case 1:
            return sum(ask(connection, TWICE))
        case _:
            return sum(ask(connection, PLAIN))


def attempt_key(connection, key):
    return sum(ask(connection, BY_KEY, (str(key),)))


def attempt_again_and_again(connection, first_keys, keys, over, totals):
    first_keys = iter(first_keys)
    while not over.is_set():
        if keys:
            totals.append(attempt_key(connection, next(first_keys, random.randrange(keys))))
        else:
            totals.append(attempt_resource(connection))


def fail(failure):
    """A failure of one thread is that of the program."""
    threading.__excepthook__(failure)
    os._exit(1)


def main(url, connections, keys):
    threading.excepthook = fail
    opened = [connect(url) for _ in range(connections)]
    say("ready")
    sys.stdin.readline()
    over = until_the_input_ends()
    totals = []
    threads = []
    for number, connection in enumerate(opened):
        arguments = (connection, range(number, keys, connections), keys, over, totals)
        threads.append(threading.Thread(target=attempt_again_and_again, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("attempted", len(totals), sum(totals))


url, connections, keys = sys.argv[1:]
main(url, int(connections), int(keys))
