// Drives npm `redlock` 5: one Redlock per client, each with connections of its own.

import { Handles, load, log, serve } from "./wire.mjs";

const { Redis } = load("ioredis");
const { default: Redlock } = load("redlock");

const clients = new Handles();
const locks = new Handles();

/** Wait for `operation`; a failure tells which errors the last attempt met. */
async function told(operation) {
  try {
    return await operation;
  } catch (error) {
    const last = await error.attempts?.at(-1);
    error.causes = last ? [...last.votesAgainst.values()].map((one) => `${one.name}: ${one.message}`) : [];
    throw error;
  }
}

function described(lock) {
  return { lock: locks.add(lock), value: lock.value, valid_ms: lock.expiration - Date.now() };
}

serve({
  open({ urls, settings }) {
    const connections = urls.map((url) => log(new Redis(url, { maxRetriesPerRequest: 1 })));
    return clients.add(new Redlock(connections, settings));
  },

  close({ client }) {
    for (const connection of clients.take(client).clients) connection.disconnect();
  },

  async acquire({ client, resources, ttl_ms, settings }) {
    return described(await told(clients.get(client).acquire(resources, ttl_ms, settings)));
  },

  async extend({ lock, ttl_ms, settings }) {
    const held = locks.get(lock);
    return described(await told(held.redlock.extend(held, ttl_ms, settings)));
  },

  async release({ lock, settings }) {
    const held = locks.get(lock);
    await told(held.redlock.release(held, settings));
  },
});
