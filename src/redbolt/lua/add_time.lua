-- Lengthen the remaining life of a key that has one, if it still holds a token.
-- KEYS[1] the lock's key   ARGV[1] the token   ARGV[2] milliseconds   ARGV[3] 1 to set them, 0 to add them
-- reply: 1 done (a life of 0 or less deletes the key), 0 absent, somebody else's, or without an end
if redis.call('get', KEYS[1]) ~= ARGV[1] then
  return 0
end
local left = redis.call('pttl', KEYS[1])
if left < 0 then
  return 0
end
if ARGV[3] == '1' then
  left = 0
end
redis.call('pexpire', KEYS[1], left + ARGV[2])
return 1
