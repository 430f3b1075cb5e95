-- Say how often an owner holds a reentrant lock, and set its remaining life.
-- KEYS[1] the lock's key   ARGV[1] the owner   ARGV[2] milliseconds, above 0   ARGV[3] the count, above 0
-- reply: 1 done, 0 the owner does not hold it
if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('hset', KEYS[1], ARGV[1], ARGV[3])
redis.call('pexpire', KEYS[1], ARGV[2])
return 1
