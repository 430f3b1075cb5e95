-- Delete a key if it still holds a token.
-- KEYS[1] the lock's key   ARGV[1] the token   reply: 1 deleted, 0 absent or somebody else's
if redis.call('get', KEYS[1]) == ARGV[1] then
  return redis.call('del', KEYS[1])
end
return 0
