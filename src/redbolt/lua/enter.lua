-- Take a free reentrant lock for an owner, once.
-- KEYS[1] the lock's key   ARGV[1] the owner   ARGV[2] milliseconds   reply: 1 taken, 0 somebody holds it
if redis.call('exists', KEYS[1]) == 1 then
  return 0
end
redis.call('hset', KEYS[1], ARGV[1], 1)
redis.call('pexpire', KEYS[1], ARGV[2])
return 1
