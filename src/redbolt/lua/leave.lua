-- Release a reentrant lock for good, and wake those who wait for it. The latch keeps the answer for a repetition.
-- KEYS[1] the lock's key   KEYS[2] its channel   KEYS[3] the latch of this release
-- ARGV[1] the owner, who never comes back   ARGV[2] life of the latch in milliseconds
-- reply: 1 released, 0 absent or somebody else's
if redis.call('hdel', KEYS[1], ARGV[1]) == 1 then
  redis.call('publish', KEYS[2], 0)
  redis.call('set', KEYS[3], 1, 'PX', ARGV[2])
  return 1
end
return redis.call('exists', KEYS[3])
