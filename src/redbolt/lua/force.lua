-- Free a reentrant lock whoever holds it, and wake those who wait for it. A key of another type is an error.
-- KEYS[1] the lock's key   KEYS[2] its channel   reply: 1 deleted, 0 absent
if redis.call('hlen', KEYS[1]) == 0 then
  return 0
end
redis.call('del', KEYS[1])
redis.call('publish', KEYS[2], 0)
return 1
