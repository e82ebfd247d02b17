// The Knex article's hash of each name on standard input.
import { readFileSync } from "node:fs";

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

function decode(written) {
  const [kind, hex, count] = written.split(":");
  const bytes = Buffer.from(hex, "hex");
  // ignoreBOM: true keeps a leading U+FEFF.
  const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  return kind === "repeat" ? text.repeat(Number(count)) : text;
}

for (const line of readFileSync(0, "utf8").trimEnd().split("\n")) {
  console.log(hashStringToInt(decode(line)));
}
