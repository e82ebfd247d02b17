// Locks one name the way a Node.js program does, on command.
//
//     client.mjs DATABASE_URL times31 NAME
//
// Reads commands from standard input, one per line: `try` prints `granted` or `busy`, `unlock`
// prints `unlocked` or `not held`. Ends with the input. Unlike `import`, `require` finds modules
// by NODE_PATH.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const pg = createRequire(import.meta.url)("pg");

// Word for word from "Distributed Locks with Postgres (Advisory Locks) and Knex.js",
// without the types.
function hashStringToInt(str) {
  let hash = 0;

  for (let i = 0; i < str.length; i++) {
    const character = str.charCodeAt(i);
    hash = (hash << 5) - hash + character;
    hash |= 0; // Convert to 32-bit integer
  }

  return hash;
}

const HASHES = { times31: hashStringToInt };

const [url, mode, name] = process.argv.slice(2);
const key = HASHES[mode](name);
const client = new pg.Client(url);
await client.connect();

async function ask(sqlFunction) {
  const { rows } = await client.query(`SELECT ${sqlFunction}($1) AS result`, [key]);
  return rows[0].result;
}

for await (const command of createInterface({ input: process.stdin })) {
  if (command === "try") {
    console.log((await ask("pg_try_advisory_lock")) ? "granted" : "busy");
  } else if (command === "unlock") {
    console.log((await ask("pg_advisory_unlock")) ? "unlocked" : "not held");
  } else {
    throw new Error(`no such command: ${command}`);
  }
}
await client.end();
