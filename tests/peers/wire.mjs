// The line protocol of the drivers. A line in: {id, op, args}; a line out: {id, at, result} or {id, at, error}.
// `at` is the clock of Linux that Python calls time.monotonic(), in seconds, when the operation ended. Several
// operations may be under way at once. The end of standard input ends the process.
//
// The first argument of the program is the folder with node_modules.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

/** Load an installed package. */
export const load = createRequire(`${process.argv[2]}/`);

console.log = console.error; // standard output is the protocol's alone

/** Objects under numbers, so that the other side can speak of them. */
export class Handles {
  #next = 1;
  #kept = new Map();

  add(thing) {
    this.#kept.set(this.#next, thing);
    return this.#next++;
  }

  get(number) {
    if (!this.#kept.has(number)) throw new RangeError(`there is no object ${number}`);
    return this.#kept.get(number);
  }

  take(number) {
    const thing = this.get(number);
    this.#kept.delete(number);
    return thing;
  }
}

/** Log what a connection reports; the operation under way fails by itself. */
export function log(connection) {
  connection.on("error", (error) => console.error(`${error.name}: ${error.message}`));
  return connection;
}

async function answer(operations, { id, op, args }) {
  const said = { id };
  try {
    if (!Object.hasOwn(operations, op)) throw new TypeError(`no such operation: ${op}`);
    said.result = (await operations[op](args)) ?? null;
  } catch (error) {
    said.error = { name: error.constructor.name, message: error.message, causes: error.causes ?? [] };
  }
  said.at = Number(process.hrtime.bigint()) / 1e9;
  process.stdout.write(`${JSON.stringify(said)}\n`);
}

/** Answer requests until standard input ends. */
export function serve(operations) {
  const all = { hello: () => process.version, ...operations };
  const lines = createInterface({ input: process.stdin });
  lines.on("line", (line) => answer(all, JSON.parse(line)));
  lines.on("close", () => process.exit(0));
}
