"""The parts that the Python clients of the campaign of contention share."""

import json
import random
import socket
import sys
import threading
import time

import psycopg2
from psycopg2 import errors


# The settings of a client are its argument; faults/src/contention/ declares them, and the messages.
SETTINGS = json.loads(sys.argv[1])


def send(message, **fields):
    """Writes a message to the process that started this one, as one line of JSON."""
    print(json.dumps({"message": message, **fields}), flush=True)


def until_the_input_ends():
    """Returns an event that the end of the standard input sets."""
    over = threading.Event()

    def wait():
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return over


def connect(url):
    connection = psycopg2.connect(url)
    connection.autocommit = True
    return connection


def query(connection, statement, parameters=()):
    """Returns the first row, or None. A statement that fails with a serialization failure at a stricter isolation level is
    repeated in a READ COMMITTED transaction, as the comments of the functions say."""
    with connection.cursor() as cursor:
        try:
            cursor.execute(statement, parameters)
            return cursor.fetchone()
        except errors.SerializationFailure:
            cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            try:
                cursor.execute(statement, parameters)
                row = cursor.fetchone()
                cursor.execute("COMMIT")
                return row
            finally:
                if not connection.closed:
                    cursor.execute("ROLLBACK")


def call(service, slot, token, deadline):
    """Calls the fragile service, and waits until it has done its work."""
    host, port = SETTINGS["address"].rsplit(":", 1)
    request = {
        "slots": SETTINGS["slots"],
        "slot": slot,
        "token": token,
        "deadline": int(deadline * 1e6),
        "work": random.randint(1, 20),
        "service": service,
    }
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(json.dumps(request).encode() + b"\n")
        caller.makefile().readline()


def hold_repeatedly(hold):
    """Calls a function that claims a slot and releases it, with a connection, the number of slots and a service, until the
    input ends. Opens a new connection when a session is lost."""
    over = until_the_input_ends()
    connection = connect(SETTINGS["url"])
    while not over.is_set():
        try:
            hold(connection, SETTINGS["slots"], random.choice(SETTINGS["services"]))
        except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
            if not connection.closed:
                raise
            send("failed", error=str(error))
            connection = connect(SETTINGS["url"])


def pause(milliseconds):
    time.sleep(random.uniform(0, milliseconds) / 1000)
