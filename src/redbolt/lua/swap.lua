-- Hand a key from one token to the next, with a life of its own.
-- KEYS[1] the lock's key   ARGV[1] the new token   ARGV[2] the old one   ARGV[3] milliseconds, above 0
-- reply: 1 done, 0 absent or somebody else's
if redis.call('get', KEYS[1]) == ARGV[2] then
  redis.call('set', KEYS[1], ARGV[1], 'PX', ARGV[3])
  return 1
end
return 0
