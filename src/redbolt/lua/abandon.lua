-- Take a reentrant lock back from an owner, and wake those who wait for it.
-- KEYS[1] the lock's key   KEYS[2] its channel   ARGV[1] the owner   reply: 1 deleted, 0 absent or somebody else's
if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('del', KEYS[1])
redis.call('publish', KEYS[2], 0)
return 1
