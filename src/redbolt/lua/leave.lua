-- Release a reentrant lock for good, and wake those who wait for it. Can be repeated: the latch keeps the answer.
-- KEYS[1] the lock's key   KEYS[2] its channel   KEYS[3] the latch of this release
-- ARGV[1] the owner   ARGV[2] life of the latch in milliseconds
-- reply: 1 released, 0 absent or somebody else's
local told = redis.call('get', KEYS[3])
if told then
  return tonumber(told)
end
if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('del', KEYS[1])
redis.call('publish', KEYS[2], 0)
redis.call('set', KEYS[3], 1, 'PX', ARGV[2])
return 1
