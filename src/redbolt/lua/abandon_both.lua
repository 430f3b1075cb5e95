-- Take a reentrant lock back from either of two owners, and wake those who wait for it.
-- KEYS[1] the lock's key   KEYS[2] its channel   ARGV[1] the new owner   ARGV[2] the old one
-- reply: 1 deleted, 0 absent or somebody else's
if redis.call('hdel', KEYS[1], ARGV[1], ARGV[2]) > 0 then
  redis.call('publish', KEYS[2], 0)
  return 1
end
return 0
