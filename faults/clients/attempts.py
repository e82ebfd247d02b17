"""Attempts a throttle through the stored functions, from the first line of the input to its end.

    attempts.py SETTINGS

Without keys it attempts the resource itself. The connections share out the keys in their order, so that the processes
meet at the first attempts, and from then on choose keys at random.
"""

import os
import random
import sys
import threading

from client import SETTINGS, connect, pause, query, send, until_the_input_ends

LOCK = "SELECT resource_control.lock_throttled_resource('contended', '{}')"

# Each is one message, which PostgreSQL runs in one transaction.
PLAIN = LOCK.format("plain")
TWICE = f"""
    SELECT set_config('faults.first', ({LOCK.format("first")})::text, false);
    SELECT current_setting('faults.first') = 'true', ({LOCK.format("second")})
"""
# The clock decides, and neither the start of the transaction nor that of the message.
SLEPT = f"""
    BEGIN ISOLATION LEVEL READ COMMITTED;
    SELECT pg_sleep(0.03);
    SELECT locked, granted, decided_at >= now() + interval '30 ms'
        FROM ({LOCK.format("slept")} AS locked) AS first,
            resource_control.attempt_throttled_resource('contended', 'slept')
"""

BY_KEY = """
    SELECT granted FROM resource_control.attempt_throttled_key('contended by key', %s, 'by the functions')
"""


def attempt_resource(connection):
    """Returns how many grants were committed."""
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
            return sum(query(connection, TWICE))
        case _:
            return sum(query(connection, PLAIN))


def attempt_key(connection, key):
    return sum(query(connection, BY_KEY, (str(key),)))


def attempt_repeatedly(connection, first_keys, keys, over, totals):
    first_keys = iter(first_keys)
    while not over.is_set():
        if keys:
            totals.append(attempt_key(connection, next(first_keys, random.randrange(keys))))
        else:
            totals.append(attempt_resource(connection))


def fail(failure):
    """Ends the program when one of its threads fails."""
    threading.__excepthook__(failure)
    os._exit(1)


def main(url, connections, keys):
    threading.excepthook = fail
    opened = [connect(url) for _ in range(connections)]
    send("ready")
    sys.stdin.readline()
    over = until_the_input_ends()
    totals = []
    threads = []
    for number, connection in enumerate(opened):
        arguments = (connection, range(number, keys, connections), keys, over, totals)
        threads.append(threading.Thread(target=attempt_repeatedly, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    send("attempted", attempts=len(totals), grants=sum(totals))


main(SETTINGS["url"], SETTINGS["connections"], SETTINGS["keys"])
