-- Announces a model call: an open intent, unless the call is settled or announced already.
-- args[1]  incarnation to give the rollout if it is new
-- args[2]  call
-- Reply    OK, names of the newest chain ends | SAME (nothing to do), the same | FROZEN | RETIRED
-- Repeat   safe: SAME
local state, err = load_state()
if err then return err end
local call = args[2]
if state then
  if state.status ~= 'open' then return reply(string.upper(state.status), state) end
  local known = redis.call('HMGET', key, 'n:' .. call, 'i:' .. call, 'x:' .. call)
  if known[1] or known[2] or known[3] then return reply('SAME', state, state.ends) end
else
  state = new_state(args[1])
end
state.seq = state.seq + 1
state.intents = state.intents + 1
write(state, {'o:' .. state.seq, '0:n:' .. call, 'n:' .. call, ''})
return reply('OK', state, state.ends)
