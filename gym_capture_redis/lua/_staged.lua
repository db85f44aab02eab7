-- Ends the transaction that stages a large part (stage.lua): takes away what its step refused.
-- KEYS[1] the rollout, ARGV[1] name of the part's field
if redis.call('HSTRLEN', KEYS[1], ARGV[1]) == 0 or redis.call('HEXISTS', KEYS[1], 's') == 0 then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
