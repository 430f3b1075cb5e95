-- Hand a reentrant lock from one owner to the next, who holds it once.
-- KEYS[1] the lock's key   ARGV[1] the new owner   ARGV[2] the old one   ARGV[3] milliseconds, above 0
-- reply: 1 done, 0 the old one does not hold it
if redis.call('hdel', KEYS[1], ARGV[2]) == 0 then
  return 0
end
redis.call('hset', KEYS[1], ARGV[1], 1)
redis.call('pexpire', KEYS[1], ARGV[3])
return 1
