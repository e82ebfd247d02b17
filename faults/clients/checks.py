"""Checks a rate limit through the stored functions, from the first line of the input to its end.

    checks.py SETTINGS

Each thread has a connection of its own.
"""

import os
import sys
import threading

from client import SETTINGS, connect, pause, query, send, until_the_input_ends

CHECK = """
    SELECT allowed, (extract(epoch FROM decided_at) * 1000000)::bigint
        FROM resource_control.check_rate_limit('contended', %s, %s, '1 s', %s, commit_async => %s)
"""


def check_repeatedly(connection, number, over, replies):
    # Some threads wait for the disk, and some do not.
    parameters = (SETTINGS["key"], SETTINGS["n"], SETTINGS["burst"], number % 2 == 0)
    while not over.is_set():
        allowed, at = query(connection, CHECK, parameters)
        replies.append(at if allowed else None)
        if not allowed:
            pause(5)


def fail(failure):
    """Ends the program when one of its threads fails."""
    threading.__excepthook__(failure)
    os._exit(1)


def main():
    threading.excepthook = fail
    opened = [connect(SETTINGS["url"]) for _ in range(SETTINGS["threads"])]
    send("ready")
    sys.stdin.readline()
    over = until_the_input_ends()
    replies = []
    threads = [
        threading.Thread(target=check_repeatedly, args=(connection, number, over, replies))
        for number, connection in enumerate(opened)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moments = [at for at in replies if at is not None]
    for at in moments:
        send("allowed", at=at)
    send("attempted", attempts=len(replies), grants=len(moments))


main()
