// Runs the JavaScript of docs/interop.md, and what it says about numbers.
//
//     page.mjs DATABASE_URL PAGE
//
// Prints the lock key that the page's own code has locked.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const pg = createRequire(import.meta.url)("pg");

const [url, path] = process.argv.slice(2);
const page = readFileSync(path, "utf8");
const blocks = [...page.matchAll(/```javascript\n(.*?)```/gs)].map(([, code]) => code);
assert.equal(blocks.length, 1);

const client = new pg.Client(url);
await client.connect();

async function locked() {
  const { rows } = await client.query(
    "SELECT classid::bigint << 32 | objid::bigint AS key FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
  );
  await client.query("SELECT pg_advisory_unlock_all()");
  return rows[0]?.key;
}

const AsyncFunction = (async () => {}).constructor;
const run = new AsyncFunction("client", "name", `${blocks[0]}; return rows;`);
assert.deepEqual(await run(client, "nightly report"), [{ granted: true }]);
const key = await locked();
assert.equal(typeof key, "string");

const [, exact, inexact] = page.match(/`pg` sends `(\d+)` as\s`(\d+)`/);
assert.equal(exact, key);
for (const [sent, expected] of [
  [Number(exact), inexact],
  [BigInt(exact), exact],
  [exact, exact],
]) {
  await client.query("SELECT pg_try_advisory_lock($1)", [sent]);
  assert.equal(await locked(), expected);
}

const [, message, unsigned] = page.match(/`(value "(\d+)" is out of range for type bigint)`/);
await assert.rejects(client.query("SELECT pg_try_advisory_lock($1)", [BigInt(unsigned)]), { message });
await run(client, "a");
assert.equal(await locked(), String(BigInt.asIntN(64, BigInt(unsigned))));

console.log(key);
await client.end();
