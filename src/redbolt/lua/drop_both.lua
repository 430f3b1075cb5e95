-- Delete a key if it holds either of two tokens: the one that was to follow, or the one before.
-- KEYS[1] the lock's key   ARGV[1] the new token   ARGV[2] the old one   reply: 1 deleted, 0 absent or somebody else's
local held = redis.call('get', KEYS[1])
if held == ARGV[1] or held == ARGV[2] then
  return redis.call('del', KEYS[1])
end
return 0
