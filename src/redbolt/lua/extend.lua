-- Set the remaining life of a key if it still holds a token.
-- KEYS[1] the lock's key   ARGV[1] the token   ARGV[2] milliseconds, above 0   reply: 1 set, 0 absent or somebody else's
if redis.call('get', KEYS[1]) == ARGV[1] then
  return redis.call('pexpire', KEYS[1], ARGV[2])
end
return 0
