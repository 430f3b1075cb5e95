// Drives npm `node-redisson`: a client is one Redisson instance with a uuid of its own, and its lock objects are kept
// by name and client id, since each remembers its lease.
//
// A waiter of this library tries, subscribes, and does not try again: what is published in between is lost to it.
// So let it subscribe before anybody unlocks. It also leaves a timer behind, which ends the subscription of that
// channel when the time of an earlier wait is over: one wait per client and name is reliable.

import { Handles, load, log, serve } from "./wire.mjs";

const { Redisson } = load("node-redisson");

// Those timers may come after their connection has ended.
process.on("unhandledRejection", (error) => console.error(error));

const clients = new Handles();

function lockOf({ client, name, id }) {
  const { redisson, locks } = clients.get(client);
  const key = JSON.stringify([name, id]);
  if (!locks.has(key)) locks.set(key, redisson.getLock(name, id));
  return locks.get(key);
}

/** Its field in the hash. */
const ownerOf = (lock) => lock.getClientName(lock.clientId);

serve({
  open({ host, port, watchdog_ms }) {
    const redisson = new Redisson({
      redis: { options: { host, port, maxRetriesPerRequest: 1 } },
      ...(watchdog_ms === null ? {} : { lockWatchdogTimeout: BigInt(watchdog_ms) }),
    });
    const { commandExecutor } = redisson;
    log(commandExecutor.redis);
    log(commandExecutor.subscribeRedis);
    return { client: clients.add({ redisson, locks: new Map() }), uuid: commandExecutor.id };
  },

  close({ client }) {
    const { redisson, locks } = clients.take(client);
    for (const lock of locks.values()) lock.cancelExpirationRenewal(true);
    redisson.commandExecutor.redis.disconnect();
    redisson.commandExecutor.subscribeRedis.disconnect();
  },

  /** Answers when the lock was granted; without `lease_ms` the watchdog renews it. */
  lock: (args) => lockOf(args).lock(args.lease_ms ?? true),

  try_lock: (args) => lockOf(args).tryLock(args.wait_ms, args.lease_ms ?? true),

  unlock: (args) => lockOf(args).unlock(),

  force_unlock: (args) => lockOf(args).forceUnlock(),

  is_locked: (args) => lockOf(args).isLocked(),

  owner: (args) => ownerOf(lockOf(args)),

  // The library itself has no such question.
  async hold_count(args) {
    const { redisson } = clients.get(args.client);
    return Number((await redisson.redis.hget(args.name, ownerOf(lockOf(args)))) ?? 0);
  },
});
