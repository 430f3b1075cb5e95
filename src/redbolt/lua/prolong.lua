-- Set the remaining life of a reentrant lock that an owner holds, however often.
-- KEYS[1] the lock's key   ARGV[1] the owner   ARGV[2] milliseconds, above 0   reply: 1 done, 0 the owner does not hold it
if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then
  return 0
end
return redis.call('pexpire', KEYS[1], ARGV[2])
